"""The dispatcher by itself: what it sends to whom, and what becomes of requests when ranks fail. Nothing is started."""

import msgspec
import pytest

from deepserve.engine.request import SamplingParams, SequenceOutput
from deepserve.messages import Abort, Place, Process, Relay, Submit
from deepserve.pd import messages as pd
from deepserve.server.dispatch import Dispatcher, HandOffOptions
from deepserve.server.registry import Engine
from deepserve.server.stats import EngineStats
from deepserve.server.stream import EngineRequest, OutputStream
from tests.deepserve.server.conftest import REGISTER

LONG = list(range(300))
LEASE_S = 3.0
WRITERS = [Process("boot", 7, 8)]


class World:
    """Engines that keep what they are sent."""

    def __init__(self, *roles: str):
        self.engines = {}
        for idx, role in enumerate(roles):
            self.join(f"{role}{idx}", role)
        self.gone: set[Engine] = set()  # sending to them fails
        self.sent: dict[Engine, list] = {engine: [] for engine in self.engines.values()}
        options = HandOffOptions(lease_s=LEASE_S, max_local_prefill_tokens=10)
        self.dispatcher = Dispatcher(self.send, lambda: list(self.engines.values()), options)
        self.num_requests = 0

    def join(self, name: str, role: str) -> Engine:
        register = msgspec.structs.replace(REGISTER, instance=name, role=role, writers=WRITERS if role == "prefill" else [])
        self.engines[name] = engine = Engine(name.encode(), register, name, EngineStats())
        return engine

    def __getitem__(self, name: str) -> Engine:
        return self.engines[name]

    def send(self, engine: Engine, message) -> bool:
        if engine in self.gone:
            if self.engines.pop(engine.instance, None):
                self.dispatcher.lost(engine, f"{engine.name} cannot be reached")
            return False
        self.sent[engine].append(pd.decode(message.frame) if type(message) is Relay else message)
        return True

    def lose(self, engine: Engine) -> None:
        del self.engines[engine.instance]
        self.dispatcher.lost(engine, "it is gone")

    def submit(self, prompt: list[int] = LONG, **params) -> EngineRequest:
        self.num_requests += 1
        stream = OutputStream(self.dispatcher.abort)
        message = Submit(f"r{self.num_requests}", prompt, SamplingParams(**params))
        request = EngineRequest(message=message, stream=stream, start_s=0.0)
        assert self.dispatcher.place(request)
        stream.requests[request.request_id] = request
        return request

    def say(self, sender: Engine, message: pd.Message, to: Engine | None = None) -> None:
        place = None if to is None else Place(*to.place)
        self.dispatcher.relay(sender, Relay(place, pd.encode(message)), to)

    def reserve(self, request: EngineRequest) -> pd.Attempt:
        """The decode rank grants what was asked for."""
        reserve = self.sent[request.engine][-1]
        assert type(reserve) is pd.Reserve and reserve.submit == request.message and reserve.lease_s == LEASE_S
        self.say(request.engine, reservation(reserve.attempt, request.engine))
        return reserve.attempt

    def hand_over(self, request: EngineRequest, attempt: pd.Attempt) -> None:
        prefill = request.hand_off.prefill
        self.say(prefill, pd.HandOff(attempt, SequenceOutput(request.request_id, 0, [5]), 1), to=request.engine)

    def error(self, request: EngineRequest) -> str:
        """How a request ended."""
        assert not request.open
        return request.stream._pending[request.request_id, 0].error


def reservation(attempt: pd.Attempt, decode: Engine) -> pd.Reservation:
    place = Place(*decode.place)
    return pd.Reservation(
        attempt, place, weight_version=7, page_size=64, num_cached_tokens=0, pages=[1], descriptions=[b""], lease_s=LEASE_S
    )


def test_a_prompt_goes_to_prefill_and_the_rest_to_decode():
    world = World("prefill", "decode")
    prefill, decode = world["prefill0"], world["decode1"]
    request = world.submit()
    assert world.sent == {prefill: [], decode: [pd.Reserve(pd.Attempt("r1", 1), request.message, Place("prefill0", 0), WRITERS, LEASE_S)]}
    assert prefill.num_queued_tokens == len(LONG) and decode.num_queued_tokens == 0
    attempt = world.reserve(request)
    (asked,) = world.sent[prefill]
    assert type(asked) is pd.Prefill and asked.submit == request.message and asked.reservation.attempt == attempt
    assert not world.dispatcher.begun(request), "nothing of it can have come"
    world.hand_over(request, attempt)
    assert type(world.sent[decode][-1]) is pd.HandOff and prefill.num_queued_tokens == 0
    assert world.dispatcher.begun(request) and not prefill.prefills and request.engine is decode


def test_what_runs_whole():
    world = World("prefill", "decode")
    prefill, decode = world["prefill0"], world["decode1"]
    short, one = world.submit(LONG[:10]), world.submit(max_tokens=1)
    assert world.sent == {decode: [short.message], prefill: [one.message]}
    world.submit([*LONG, 7])  # is known there from now on, but for the end
    again = world.submit([*LONG[:256], 8])
    assert world.sent[decode][-1] == again.message
    del world.engines["prefill0"]
    alone = world.submit(LONG[::-1])
    assert world.sent[decode][-1] == alone.message, "decode ranks compute prompts where nobody else does"


def test_prompts_go_where_their_beginning_is_known_and_little_is_queued():
    world = World("prefill", "prefill", "decode", "decode")
    first = world.submit(LONG)
    attempt = world.reserve(first)
    home = first.hand_off.prefill
    world.hand_over(first, attempt)
    decode = first.engine
    assert world.dispatcher.begun(first)
    decode.requests.clear()
    assert all(world.submit([*LONG[:256], *range(tail, tail + 30)]).hand_off.prefill is home for tail in range(3))
    assert world.submit(LONG[::-1]).hand_off.prefill is not home, "less is queued at the other one"


def test_messages_between_ranks_are_passed_on_with_their_sender():
    world = World("prefill", "decode")
    prefill, decode = world["prefill0"], world["decode1"]
    frames = []
    world.dispatcher._send = lambda engine, message: frames.append((engine, message)) or True
    settled = pd.Settled(pd.Attempt("of an earlier frontend", 3), WRITERS)
    world.say(prefill, settled, to=decode)
    world.dispatcher.relay(prefill, Relay(Place("nobody", 0), pd.encode(settled)), None)
    world.dispatcher.relay(prefill, Relay(Place(*decode.place), b"junk"), decode)
    assert frames == [(decode, Relay(Place("prefill0", 0), pd.encode(settled)))]


@pytest.mark.parametrize("giver", ["prefill", "decode"])
def test_what_is_given_up_runs_elsewhere_once(giver):
    world = World("prefill", "prefill", "decode")
    request = world.submit()
    decode = request.engine
    attempts = [world.reserve(request)]
    for _ in range(2):
        prefill = request.hand_off.prefill
        sides = (prefill, decode) if giver == "prefill" else (decode, prefill)
        world.say(sides[0], pd.GiveUp(attempts[-1], "too bad"), to=sides[1])
        assert pd.GiveUp(attempts[-1], "too bad") in world.sent[sides[1]]
        if request.open:
            assert request.hand_off.prefill is not prefill
            attempts.append(world.reserve(request))
    assert len(set(attempts)) == 2 and world.error(request) == "too bad" and decode.stats.num_retried == 1
    assert not any(engine.requests or engine.prefills for engine in world.engines.values())


def test_messages_of_an_attempt_that_is_over_change_nothing():
    world = World("prefill", "prefill", "decode")
    request = world.submit()
    decode, first = request.engine, request.hand_off.prefill
    old = world.reserve(request)
    world.say(first, pd.GiveUp(old, "too bad"), to=decode)
    new = request.hand_off.attempt
    second = request.hand_off.prefill
    world.say(decode, reservation(old, decode))
    world.say(first, pd.HandOff(old, SequenceOutput("r1", 0, [5]), 1), to=decode)
    world.say(decode, pd.GiveUp(old, "late"), to=first)
    assert request.hand_off.attempt == new and not world.sent[second] and not world.dispatcher.begun(request)


@pytest.mark.parametrize("phase", ["reserving", "prefilling"])
def test_a_lost_prefill_rank_costs_a_retry(phase):
    world = World("prefill", "decode")
    prefill, decode = world["prefill0"], world["decode1"]
    request = world.submit()
    if phase == "prefilling":
        world.reserve(request)
    world.lose(prefill)
    assert world.sent[decode][-2:] == [Abort(["r1"]), request.message], "with nobody to compute prompts decode does"
    assert request.retried and request.hand_off is None
    world.lose(decode)
    assert world.error(request) == "it is gone"


def test_a_prefill_rank_lost_behind_its_hand_off_is_told_to_decode():
    """All may have arrived, and the sequence may run; then it means nothing."""
    world = World("prefill", "decode")
    request = world.submit()
    attempt = world.reserve(request)
    world.hand_over(request, attempt)
    world.lose(world["prefill0"])
    assert world.sent[request.engine][-1] == pd.GiveUp(attempt, "it is gone") and not request.retried
    world.say(request.engine, pd.GiveUp(attempt, "nothing came"), to=None)
    assert world.sent[request.engine][-1] == request.message and request.retried


def test_instances_whose_hand_off_was_given_up_have_one_at_a_time_until_one_succeeds():
    """The link may be cut, so that each waits for a lease."""
    world = World("prefill", "decode", "decode")
    first = world.submit()
    decode = first.engine
    other = next(engine for name, engine in world.engines.items() if name.startswith("decode") and engine is not decode)
    world.say(decode, pd.GiveUp(world.reserve(first), "nothing came"), to=world["prefill0"])
    assert first.hand_off is None

    def submit() -> EngineRequest:
        """A request that `decode` answers."""
        del world.engines[other.instance]
        request = world.submit()
        world.engines[other.instance] = other
        return request

    probe = submit()
    attempt = world.reserve(probe)
    assert [submit().hand_off for _ in range(3)] == [None] * 3
    del world.engines[decode.instance]
    assert world.submit().hand_off is not None, "to the other one it may be well"
    world.engines[decode.instance] = decode
    world.hand_over(probe, attempt)
    assert world.dispatcher.begun(probe)
    assert all(submit().hand_off is not None for _ in range(3))


def test_a_lost_decode_rank_is_told_to_prefill():
    world = World("prefill", "decode", "decode")
    request = world.submit()
    attempt = world.reserve(request)
    lost = request.engine
    world.lose(lost)
    assert pd.GiveUp(attempt, "it is gone") in world.sent[world["prefill0"]]
    assert request.engine is not lost and type(world.sent[request.engine][-1]) is pd.Reserve
    world.hand_over(request, world.reserve(request))
    assert world.dispatcher.begun(request)
    request.prefilled = True
    world.lose(request.engine)
    assert world.error(request) == "it is gone", "some of it has reached the client"


def test_an_engine_that_proves_to_be_gone_is_passed_over():
    world = World("prefill", "decode", "decode")
    world.gone.add(world["decode1"])
    requests = [world.submit() for _ in range(3)]
    assert {request.engine.instance for request in requests} == {"decode2"}
    world.gone.add(world["prefill0"])
    world.reserve(requests[-1])  # whose `Prefill` does not get there
    assert all(request.hand_off is None and request.retried for request in requests)


def test_quiet_ranks_keep_what_can_go_nowhere_else():
    world = World("prefill", "decode")
    request = world.submit()
    world.reserve(request)
    quiet = world.engines.pop("decode1")
    world.dispatcher.move(quiet, "quiet")
    assert request.engine is quiet and request.open
    other = world.join("decode9", "decode")
    world.sent[other] = []
    world.dispatcher.move(quiet, "quiet")
    assert request.engine is other and world.sent[quiet][-1] == Abort(["r1"])


def test_a_client_that_leaves_is_told_to_the_decode_rank():
    world = World("prefill", "decode")
    requests = [world.submit(), world.submit()]
    world.reserve(requests[-1])
    for request in requests:
        request.stream.close(1.0)
    assert world.sent[world["decode1"]][-2:] == [Abort(["r1"]), Abort(["r2"])]
    assert not any(engine.requests or engine.prefills for engine in world.engines.values())


@pytest.mark.parametrize(("name", "value"), [("lease_s", 0.5), ("lease_s", float("inf")), ("max_local_prefill_tokens", -1)])
def test_options_are_checked(name, value):
    with pytest.raises(ValueError, match=f"hand_off: {name} must be at least .*, got {value}"):
        HandOffOptions(**{name: value})
