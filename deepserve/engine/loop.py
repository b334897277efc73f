"""The process of one engine rank: sockets, and the votes of lockstep, around `Engine`.

Started by `deepserve.spawn` as `python -m deepserve.engine.loop`, with one line of JSON on stdin: `RankOptions`. Stdin stays open as a
lifeline: when whoever started the rank is gone, it ends, and so does the rank.
"""

import logging
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn

import msgspec
import torch.distributed as dist
import zmq

from deepserve.control import Line
from deepserve.engine.elastic import Elastic
from deepserve.engine.engine import Engine, resolve
from deepserve.engine.lockstep import Ballot, Lockstep, Wait
from deepserve.engine.membership import Excluded, Membership
from deepserve.engine.pulse import LINGER_MS, Heart, Lifeline, RankOptions
from deepserve.engine.request import SequenceOutput
from deepserve.engine.step import StepPlan
from deepserve.messages import (
    PROTOCOL_VERSION,
    Abort,
    Drain,
    FromEngine,
    Goodbye,
    Leaving,
    Load,
    Outputs,
    Place,
    Register,
    Relay,
    Submit,
    ToEngine,
)
from deepserve.messages import Stop as StopNow
from deepserve.model.checkpoint import fingerprint
from deepserve.pd import messages as pd
from deepserve.pd.role import HandOffs
from deepserve.spawn import EXIT_PEER_LOST
from hw.groups import PeerLost, Rendezvous, open_groups
from hw.topology import ParallelConfig

logger = logging.getLogger("deepserve.engine")

START_TIMEOUT_S = 300.0  # by which ranks of an instance may differ in starting and in loading


class EngineLoop:
    """Receives, steps in lockstep with the other ranks, sends, until told to end.

    Only ranks that lead their TP group talk to frontends. Requests of a frontend are answered to that frontend, on the connection
    that they came on: if it breaks, they are forgotten, since nobody can tell what of them was lost.
    """

    def __init__(self, engine: Engine, options: RankOptions, context: zmq.Context, lifeline: Lifeline, elastic: Elastic | None = None):
        """Collective over the instance; a later life of a rank joins it. elastic: what outlives the loss of ranks; None: it ends all."""
        self.engine, self.options = engine, options
        self._context, self._lifeline, self._elastic = context, lifeline, elastic
        self._dp_rank = options.rank // engine.config.parallel.tp
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._home: dict[str, zmq.Socket] = {}  # request -> who sent it
        self._hand_offs: HandOffs | None = None
        if options.role != "unified":
            place = Place(options.instance, self._dp_rank)
            self._hand_offs = HandOffs(options.role, place, engine, self._relay, self._home.__setitem__)
        if options.life and elastic is not None:  # now that nothing here takes long: the others wait from then on
            elastic.join()
        self._lockstep = self._open_lockstep()
        secret, dead_link_s = options.secret, options.dead_link_s
        leads = engine.groups.is_leader
        self._lines = [Line(context, address, secret=secret, dead_link_s=dead_link_s) for address in options.frontends] if leads else []
        self._poller = zmq.Poller()
        self._poller.register(lifeline.news, zmq.POLLIN)
        for line in self._lines:
            self._poller.register(line.socket, zmq.POLLIN)
            self._poller.register(line.monitor, zmq.POLLIN)
        self._draining = self._leaving = self._stopping = False
        limit_s = None if elastic is None else elastic.limit_s
        self._heart = Heart(context, options, self._dp_rank, limit_s=limit_s) if leads else None

    def _open_lockstep(self) -> Lockstep:
        engine, options = self.engine, self.options
        cap = engine.config.args.max_dispatch_tokens_per_rank
        shared = {"captured": engine.captures, "overlap": engine.overlap}
        return Lockstep(engine.groups, self._context, cap, **shared, address=options.address, secret=options.secret)

    def run(self) -> None:
        """Until a rank is told to stop, or all have drained. Raises PeerLost, if the instance does not outlive that."""
        if self._heart is not None:
            self._heart.start()
        whole = True
        try:
            while True:
                try:
                    if not whole:
                        self._regroup()
                        whole = True
                    elif not self._step():
                        break
                except PeerLost as error:  # no longer handled below: it holds connections that peers wait for to close
                    if self._elastic is None or isinstance(error, Excluded):
                        raise
                    logger.warning("rank %d lost a peer: %s", self.options.rank, error)
                    whole = False
        finally:
            if self._heart is not None:
                self._heart.stop()

    def _step(self) -> bool:
        """One turn of the loop. Returns whether to go on."""
        if self._heart is not None:
            self._heart.turn_s = time.monotonic()
        self._receive()
        if self._hand_offs is not None:
            self._send_outputs(self._hand_offs.turn())
        plan = self.engine.plan()
        outcome = self._lockstep.vote(self._ballot(plan))
        if outcome.end or self.engine.groups.dp_rank in outcome.leaving:
            return False
        if outcome.regroup:
            self._regroup(outcome.leaving, planned=True)
            return True
        if self._hand_offs is not None:
            self._hand_offs.exchange(outcome)
        if outcome.idle:
            if not outcome.news:
                self._lockstep.park(self._poller, outcome.wait, None if self._hand_offs is None else self._hand_offs.look)
            return True
        if outcome.collect:
            self._send_outputs(self.engine.collect())
            return True
        has_tokens = outcome.num_tokens[self.engine.groups.dp_rank] > 0
        outputs = self.engine.run(plan, outcome.step, has_tokens=has_tokens, num_drafts=outcome.num_drafts)
        self._send_outputs(outputs)
        if (balance := self.engine.take_balance()) is not None:
            for line in self._lines:
                self._send(line.socket, balance)
        return True

    def _regroup(self, leaving: tuple[int, ...] = (), *, planned: bool = False) -> None:
        assert self._elastic is not None
        self._lockstep.close()
        self._elastic.regroup(leaving, planned=planned)
        self._lockstep = self._open_lockstep()

    def _ballot(self, plan: StepPlan | None) -> Ballot:
        hand_offs = self._hand_offs
        shared = {} if hand_offs is None else {"wait": hand_offs.wait, "has_news": hand_offs.has_news}
        if self._heart is None:
            return Ballot(**shared)
        if self._elastic is not None:
            shared["regroup"] = self._elastic.somebody_applies
            shared["wait"] = max(Wait.WHILE, shared.get("wait", Wait.WHILE))  # until the next look for who applies
        self._heart.load = self._load()
        has_work = self.engine.has_work or (hand_offs is not None and hand_offs.has_work)
        drained, shared["leaves"] = self._draining and not has_work, self._leaving and not has_work
        num_tokens, num_drafts = (0, 0) if plan is None else (plan.num_tokens, plan.num_drafts)
        return Ballot(num_tokens, has_work, self.engine.has_launched, self._stopping, drained, num_drafts, **shared)

    def _load(self) -> Load:
        load = self.engine.load()
        return load if self._hand_offs is None else self._hand_offs.load(load)

    def close(self, error: str = "") -> None:
        """Say goodbye and close the sockets."""
        self._lockstep.close()
        if self._hand_offs is not None:
            self._hand_offs.close()
        for line in self._lines:
            self._send(line.socket, Goodbye(error))
            line.close(LINGER_MS)

    def _register(self, socket: zmq.Socket) -> None:
        config, engine = self.engine.config, self.engine
        message = Register(
            protocol_version=PROTOCOL_VERSION,
            instance=self.options.instance,
            role=self.options.role,
            dp_rank=self._dp_rank,
            model_fingerprint=model_fingerprint(engine),
            weight_version=engine.pages.weight_version,
            vocab_size=config.model.vocab_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.args.max_num_seqs,
            page_size=config.page_size,
            num_pages=engine.pages.num_pages,
            pid=os.getpid(),
            outlived=self._elastic is not None,
            writers=[] if self._hand_offs is None else self._hand_offs.writers,
        )
        self._send(socket, message)
        if self._draining:
            self._send(socket, Leaving())

    def _receive(self) -> None:
        """Take every message that is there, and the news of the connections."""
        for line in self._lines:
            broken, made = line.read_news()
            if broken or made:
                for _ in _messages(line.socket):  # of the old connection
                    pass
                self._forget(line.socket)
            if made:
                self._register(line.socket)
            for payload in _messages(line.socket):
                self._on_message(line.socket, self._decoder.decode(payload))
        self._lifeline.hush()
        drain, leave = self._lifeline.drain.is_set() and not self._draining, self._lifeline.leave.is_set() and not self._leaving
        if drain or leave:
            self._draining, self._leaving = self._draining or drain, self._leaving or leave
            for line in self._lines:
                self._send(line.socket, Leaving())
        if self._elastic is not None:
            self._elastic.check()

    def _forget(self, socket: zmq.Socket) -> None:
        """Abort what came on this connection."""
        if self._hand_offs is not None:
            self._hand_offs.forget(socket)
        request_ids = [request_id for request_id, home in self._home.items() if home is socket]
        self.engine.abort(request_ids)
        for request_id in request_ids:
            del self._home[request_id]

    def _on_message(self, socket: zmq.Socket, message: ToEngine) -> None:
        match message:
            case Submit():
                self._home[message.request_id] = socket
                self.engine.submit(message)
            case Abort():
                if self._hand_offs is not None:
                    self._hand_offs.abort(message.request_ids)
                self.engine.abort(message.request_ids)
                for request_id in message.request_ids:
                    self._home.pop(request_id, None)
            case Relay(peer, frame):
                if self._hand_offs is not None:
                    self._hand_offs.on_message(socket, peer, pd.decode(frame))
            case Drain():
                self._draining = True
            case StopNow():
                self._stopping = True

    def _relay(self, socket: zmq.Socket, peer: Place | None, message: pd.Message) -> None:
        self._send(socket, Relay(peer, pd.encode(message)))

    def _send_outputs(self, outputs: list[SequenceOutput]) -> None:
        if self._hand_offs is not None:
            outputs = self._hand_offs.take(outputs)
        if not outputs:
            return
        by_home: dict[zmq.Socket, list[SequenceOutput]] = defaultdict(list)
        for output in outputs:
            by_home[self._home[output.request_id]].append(output)
        load = self._load()
        for socket, mine in by_home.items():
            self._send(socket, Outputs(mine, load))
        for output in outputs:
            if output.finish_reason is not None and not self.engine.knows(output.request_id):
                self._home.pop(output.request_id, None)

    def _send(self, socket: zmq.Socket, message: FromEngine) -> None:
        with suppress(zmq.Again):  # only where the frontend has never let us in
            socket.send(self._encoder.encode(message), zmq.NOBLOCK)


def _messages(socket: zmq.Socket) -> Iterator[bytes]:
    """Those that are there."""
    while True:
        try:
            payload = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield payload


def model_fingerprint(engine: Engine) -> str:
    """Equal for ranks that serve the same weights."""
    args = engine.config.args
    return f"dummy-{args.seed}" if args.load_format == "dummy" else fingerprint(engine.config.model_path)


def _rendezvous(options: RankOptions) -> Rendezvous | None:
    """Where the ranks meet; None for one that stays alone. The store lives in a file, or in a process that outlives every rank."""
    args = options.args
    if args.data_parallel_size * args.tensor_parallel_size == 1 and args.on_rank_death == "fail":
        return None
    kind, _, rest = options.rendezvous.partition(":")
    if kind == "file":
        store = dist.FileStore(rest)
    else:
        assert kind == "tcp", options.rendezvous
        host, port, prefix = rest.rsplit(":", 2)
        store = dist.PrefixStore(prefix, dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=START_TIMEOUT_S)))
    return Rendezvous(store, START_TIMEOUT_S, options.address)


def _start(options: RankOptions, context: zmq.Context, lifeline: Lifeline) -> EngineLoop:
    """Load, and come together with the other ranks. Raises ValueError for what cannot run, and PeerLost."""
    config, rendezvous = resolve(options.args), _rendezvous(options)
    if not options.life:
        groups = open_groups(config.parallel, options.rank, rendezvous)
        addresses = groups.world.broadcast_bytes(msgspec.msgpack.encode(options.frontends) if options.rank == 0 else None)
        options = msgspec.structs.replace(options, frontends=msgspec.msgpack.decode(addresses, type=list[str]))
    else:  # its TP group first, then that joins the others
        tp = config.parallel.tp
        store = dist.PrefixStore(f"replica{options.rank // tp}/life{options.life}", rendezvous.store)
        groups = open_groups(ParallelConfig(tp=tp), options.rank % tp, replace(rendezvous, store=store))
    # One more rank than there were at first begins with the experts of one of those.
    engine, elastic = Engine(config, groups, rank=options.rank % config.parallel.num_ranks), None
    if config.args.on_rank_death == "replan" and rendezvous is not None:
        membership = Membership(rendezvous.store, config.parallel, options.rank, options.life, lambda: lifeline.lost)
        elastic = Elastic(engine, membership, rendezvous)
    loop = EngineLoop(engine, options, context, lifeline, elastic)
    groups.set_timeout(options.args.step_timeout_s)
    return loop


def main() -> int:
    """Run a rank; returns only if it could not start."""
    # Service managers signal every process. Whoever started the rank drains first and then cuts the lifeline.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # what waited is ignored
    options = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankOptions)
    form = f"%(asctime)s %(levelname)s %(name)s, rank {options.rank}: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr)
    lifeline = Lifeline(sys.stdin.buffer)
    lifeline.start()
    context = zmq.Context()
    try:
        loop = _start(options, context, lifeline)
    except ValueError as error:
        print(f"deepserve: rank {options.rank} cannot start: {error}", file=sys.stderr, flush=True)
        return 1
    except PeerLost as error:
        print(f"deepserve: rank {options.rank} cannot start without its peers: {error}", file=sys.stderr, flush=True)
        return EXIT_PEER_LOST
    code, reason = 0, ""
    try:
        loop.run()
    except PeerLost as error:
        code, reason = EXIT_PEER_LOST, f"rank {options.rank} lost a peer"  # clients read this; how it showed is for the log
        logger.error("%s: %s", reason, error)
    except Exception as error:
        code, reason = 1, f"rank {options.rank} failed with {type(error).__name__}"
        logger.exception(reason)
    loop.close(reason)
    context.term()
    # From here, while all of it is still held: what ranks share on GPUs is torn down together with the others, who may be gone.
    leave(code)


def leave(code: int) -> NoReturn:
    """End at once: the lifeline thread sits in a read that nothing interrupts."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
