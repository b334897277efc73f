"""Pages between two processes over NIXL: what arrives, what does not, and what is said about it."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from hw.api import Unsupported
from hw.nixl_transfer import NixlTransfer, _runs
from hw.transfer import Part, WriteState

WAIT_S = 60.0  # generous: machines that run tests are busy
LATE_S = 10.0  # how much later than its deadline a test may see an end, on a busy machine
SMALL = [(37, 3, 5), (37, 64, 3)]  # shapes of regions: pages of 15 and 192 fp32 values
MEDIUM = [(2048, 1 << 15)]  # 256 MiB: long enough to stop it half way
LARGE = [(2048, 1 << 17)]  # 1 GiB of fp32 over TCP takes seconds


def blank(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    return [torch.zeros(shape) for shape in shapes]


def serve(pipe: Any) -> None:
    """Another process with pages: runs the functions it is sent on its transfer and its caches, which `blank` makes anew."""
    os.environ["UCX_TLS"] = "tcp"  # of this process; shared memory would need no other side
    torch.set_num_threads(1)
    transfer, caches, writes = None, [], []
    while True:
        function, arguments = pipe.recv()
        if function is blank:
            if transfer is not None:
                transfer.close()
            caches, writes = blank(*arguments), []
            transfer = NixlTransfer("there", caches)
            pipe.send(None)
        else:
            pipe.send(function(transfer, caches, writes, *arguments))


class Other:
    """The other process."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, function: Callable, *arguments: Any) -> Any:
        self.ask(function, *arguments)
        return self.answer(function)

    def ask(self, function: Callable, *arguments: Any) -> None:
        self._pipe.send((function, arguments))

    def answer(self, function: Callable) -> Any:
        assert self._pipe.poll(WAIT_S), f"the other process did not answer {function.__name__}"
        return self._pipe.recv()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def describe(transfer, caches, writes):
    return transfer.describe()


def poll(transfer, caches, writes):
    return transfer.poll()


def read(transfer, caches, writes):
    return [cache.numpy().copy() for cache in caches]


def count(transfer, caches, writes):
    """Pages whose last value has been written, and the parts that were announced."""
    return int((caches[0][:, -1] != 0).sum()), transfer.poll()


def reply(transfer, caches, writes, description, pages):
    """Write pages full of sevens back."""
    for cache in caches:
        cache.fill_(7)
    peer = transfer.connect(description)
    writes.append(transfer.write(peer, Part("back", 1, 0, 0, True), range(len(caches)), pages, pages, time.monotonic() + WAIT_S))


def states(transfer, caches, writes):
    transfer.poll()
    return [(write.state, write.settled) for write in writes]


@pytest.fixture(scope="module")
def lasting():
    """For tests that do not kill or stop it: starting takes longer than they do."""
    other = Other()
    yield other
    other.end()


@pytest.fixture
def pair(monkeypatch, request, lasting):
    """This process's transfer and caches with random content, and the other process, which has zeros."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    shapes = getattr(request, "param", SMALL)
    other = lasting if shapes is SMALL else Other()
    other(blank, shapes)
    caches = [torch.randn(shape) for shape in shapes] if shapes is SMALL else [torch.ones(shape) for shape in shapes]
    transfer = NixlTransfer("here", caches)
    yield transfer, caches, other
    if other is not lasting:
        other.end()
    transfer.close()


def until(condition: Callable[[], Any], wait_s: float = WAIT_S) -> Any:
    deadline_s = time.monotonic() + wait_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "it does not come"
    return found


def settle(transfer: NixlTransfer, *writes: Any) -> None:
    until(lambda: transfer.poll() or all(write.settled for write in writes))


def assert_silence(transfer: NixlTransfer, peer: str, other: Other) -> Any:
    """Nothing is announced before a part that starts now; its write. Notifications keep their order, so none is under way."""
    mark = Part("mark", 1, 0, 0, True)
    write = transfer.write(peer, mark, [], [], [], soon())
    settle(transfer, write)
    assert until(lambda: other(poll)) == [(transfer.name, mark)]
    return write


def soon() -> float:
    return time.monotonic() + WAIT_S


@pytest.mark.parametrize("num_pages", [0, 1, 7, 36])
def test_pages_arrive_bit_for_bit_and_nothing_else_changes(pair, num_pages):
    transfer, caches, other = pair
    peer = transfer.connect(other(describe))
    order = torch.randperm(37).tolist()
    pages, peer_pages = order[:num_pages], torch.randperm(37).tolist()[:num_pages]
    part = Part("t", 1, 0, 0, True)
    write = transfer.write(peer, part, range(2), pages, peer_pages, soon())
    settle(transfer, write)
    assert write.state is WriteState.DONE
    assert until(lambda: other(poll)) == [(transfer.name, part)]
    assert other(poll) == []  # once
    for cache, there in zip(caches, other(read), strict=True):
        expected = torch.zeros_like(cache)
        expected[peer_pages] = cache[pages]
        assert there.tobytes() == expected.numpy().tobytes()


def test_regions_go_in_shares_and_both_ways(pair):
    transfer, caches, other = pair
    peer = transfer.connect(other(describe))
    write = transfer.write(peer, Part("t", 1, 0, 0, True), [1], [3], [30], soon())
    settle(transfer, write)
    first, second = other(read)
    assert not first.any()
    assert (second[30] == caches[1][3].numpy()).all()
    other(reply, transfer.describe(), [5, 6])
    assert until(lambda: other(states)[0][1] and transfer.poll()) == [(peer, Part("back", 1, 0, 0, True))]
    assert all((cache[5:7] == 7).all() and not (cache[:5] == 7).any() for cache in caches)


def test_two_attempts_are_told_apart(pair):
    transfer, _, other = pair
    peer = transfer.connect(other(describe))
    parts = [Part("t", epoch, 0, idx, idx == 1) for epoch in (1, 2) for idx in (0, 1)]
    writes = [transfer.write(peer, part, range(2), [idx], [idx], soon()) for idx, part in enumerate(parts)]
    writes[1].cancel()
    settle(transfer, *writes)
    arrived: list[Part] = []
    until(lambda: arrived.extend(part for _, part in other(poll)) or len(arrived) == 3)
    assert sorted(arrived, key=parts.index) == [parts[0], parts[2], parts[3]]


def test_a_cancelled_write_never_counts_as_done(pair):
    transfer, _, other = pair
    peer = transfer.connect(other(describe))
    write = transfer.write(peer, Part("t", 1, 0, 0, True), range(2), list(range(37)), list(range(37)), soon())
    write.cancel()
    write.cancel()
    settle(transfer, write)
    assert write.state is WriteState.CANCELLED
    done = assert_silence(transfer, peer, other)
    done.cancel()
    assert done.state is WriteState.DONE  # too late


def test_a_write_past_its_deadline_never_counts_as_done(pair):
    transfer, _, other = pair
    peer = transfer.connect(other(describe))
    write = transfer.write(peer, Part("t", 1, 0, 0, True), range(2), [0], [0], time.monotonic())
    settle(transfer, write)
    assert write.state is WriteState.TIMED_OUT
    assert_silence(transfer, peer, other)


@pytest.mark.parametrize("pair", [LARGE], indirect=True)
def test_a_killed_peer_is_noticed_within_the_deadline(pair):
    transfer, caches, other = pair
    peer = transfer.connect(other(describe))
    everything = list(range(len(caches[0])))
    start_s = time.monotonic()
    write = transfer.write(peer, Part("t", 1, 0, 0, True), [0], everything, everything, start_s + 5.0)
    until(lambda: other(count)[0])
    other.signal(signal.SIGKILL)
    until(lambda: transfer.poll() or write.state is not WriteState.RUNNING, 5.0 + LATE_S)
    assert write.state in (WriteState.FAILED, WriteState.TIMED_OUT)
    settle(transfer, write)  # the connection broke, so nothing of it is under way
    after = transfer.write(peer, Part("t", 1, 0, 1, True), [0], [0], [0], time.monotonic() + 5.0)
    until(lambda: transfer.poll() or after.state is not WriteState.RUNNING, 5.0 + LATE_S)
    assert after.state in (WriteState.FAILED, WriteState.TIMED_OUT)
    transfer.disconnect(peer)
    transfer.poll()
    with pytest.raises(KeyError):
        transfer.write(peer, Part("t", 2, 0, 0, True), [0], [0], [0], soon())


@pytest.mark.parametrize("pair", [LARGE], indirect=True)
def test_a_stalled_peer_times_out_and_its_pages_are_unsettled_until_it_goes_on(pair):
    """Disconnecting does not call bytes back: this is why cancelled pages are quarantined, and until when."""
    transfer, caches, other = pair
    description = other(describe)
    peer = transfer.connect(description)
    everything = list(range(len(caches[0])))
    write = transfer.write(peer, Part("t", 1, 0, 0, True), [0], everything, everything, time.monotonic() + 0.5)
    until(lambda: other(count)[0])
    other.signal(signal.SIGSTOP)
    until(lambda: transfer.poll() or write.state is not WriteState.RUNNING, 0.5 + LATE_S)
    assert (write.state, write.settled) == (WriteState.TIMED_OUT, False)
    transfer.disconnect(peer)
    transfer.poll()
    assert not write.settled
    with pytest.raises(ValueError, match="have yet to settle"):
        transfer.connect(description)
    other.ask(count)  # the first that it does when it goes on
    other.signal(signal.SIGCONT)
    num_before, _ = other.answer(count)
    assert num_before < len(everything)
    settle(transfer, write)
    assert other(count) == (len(everything), [])  # all in place by then, and not announced
    again = transfer.write(transfer.connect(description), Part("t", 2, 0, 0, True), [0], [0], [0], soon())
    settle(transfer, again)
    assert again.state is WriteState.DONE


@pytest.mark.parametrize("pair", [MEDIUM], indirect=True)
def test_a_stopped_writer_that_goes_on_behind_the_end_of_a_transfer_changes_nothing(pair):
    """This is how pages come back from writers that do not answer; a second transfer of the same pages serves meanwhile."""
    transfer, (cache,), other = pair
    everything = list(range(len(cache)))
    other(reply, transfer.describe(), everything)
    until(lambda: transfer.poll() or (cache[:, -1] == 7).any())
    other.signal(signal.SIGSTOP)
    assert not (cache[:, -1] == 7).all(), "too late to see anything"
    second = NixlTransfer("again", [cache])
    transfer.close()
    cache.fill_(-1)
    other.ask(states)  # the first that it does when it goes on
    other.signal(signal.SIGCONT)
    other.answer(states)
    until(lambda: second.poll() or other(states)[0][1])
    assert other(states) == [(WriteState.FAILED, True)]
    assert (cache == -1).all()
    other(reply, second.describe(), [5])
    assert [part for _, part in until(lambda: other(states) and second.poll())] == [Part("back", 1, 0, 0, True)]
    assert (cache[5] == 7).all() and (cache[:5] == -1).all() and (cache[6:] == -1).all()
    second.close()


def test_what_is_refused(pair):
    transfer, _, other = pair
    description = other(describe)
    peer = transfer.connect(description)
    assert transfer.connect(description) == peer
    part = Part("t", 1, 0, 0, True)
    for regions, pages, peer_pages, message in (
        ([2], [0], [0], "region 2 is not one of the 2"),
        ([0], [37], [0], "page 37 is not one of the 37"),
        ([0], [0], [-1], f"page of peer '{peer}' -1 is not one of the 37"),
        ([0], [0, 1], [0], "2 pages cannot go to 1 pages"),
    ):
        with pytest.raises(ValueError, match=message):
            transfer.write(peer, part, regions, pages, peer_pages, soon())
    with pytest.raises(ValueError, match="9 bytes are no description"):
        transfer.connect(b"gibberish")
    fields = msgspec.msgpack.decode(description)
    with pytest.raises(ValueError, match="in version 9, this is version 1"):
        transfer.connect(msgspec.msgpack.encode([9, *fields[1:]]))
    with pytest.raises(ValueError, match="'impostor' comes with the metadata of 'there-"):
        transfer.connect(msgspec.msgpack.encode([1, "impostor", *fields[2:]]))
    smaller = NixlTransfer("smaller", blank(SMALL[:1]))
    with pytest.raises(ValueError, match=r"pages of \[60, 768\] bytes by region, these are of \[60\]"):
        smaller.connect(description)
    smaller.close()


def test_caches_that_cannot_be_registered():
    with pytest.raises(ValueError, match=r"one number of pages, not \[\]"):
        NixlTransfer("t", [])
    with pytest.raises(ValueError, match=r"one number of pages, not \[2, 3\]"):
        NixlTransfer("t", [torch.zeros(2, 2), torch.zeros(3, 2)])
    with pytest.raises(ValueError, match="not one behind the other"):
        NixlTransfer("t", [torch.zeros(2, 4)[:, :2]])
    with pytest.raises(Unsupported, match="nixl: pages in memory of meta"):
        NixlTransfer("t", [torch.zeros(2, 2, device="meta")])


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(Unsupported, match=r"needs NIXL: pip install 'deepserve\[pd\]'"):
        NixlTransfer("t", [torch.zeros(2, 2)])


def test_a_stranger_s_notification_is_dropped(pair):
    transfer, _, other = pair
    peer = transfer.connect(other(describe))
    for note in (b"", b"gibberish", msgspec.msgpack.encode(["t", "one", 0, 0, True])):
        transfer._agent.send_notif(peer, note)
    part = Part("t", 1, 0, 0, True)
    settle(transfer, transfer.write(peer, part, [], [], [], soon()))
    assert until(lambda: other(poll)) == [(transfer.name, part)]


def test_pages_that_follow_one_another_on_both_sides_travel_as_one(pair):
    pages, peer_pages = [4, 5, 6, 9, 10, 3, 2, 7, 8], [1, 2, 3, 4, 5, 8, 9, 0, 6]
    firsts, peer_firsts, lengths = _runs(pages, peer_pages)
    assert firsts.tolist() == [4, 9, 3, 2, 7, 8] and peer_firsts.tolist() == [1, 4, 8, 9, 0, 6]
    assert lengths.tolist() == [3, 2, 1, 1, 1, 1]
    transfer, caches, other = pair
    peer = transfer.connect(other(describe))
    settle(transfer, transfer.write(peer, Part("t", 1, 0, 0, True), range(2), pages, peer_pages, soon()))
    until(lambda: other(poll))
    for cache, there in zip(caches, other(read), strict=True):
        assert there[peer_pages].tobytes() == cache[pages].numpy().tobytes()
