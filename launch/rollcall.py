"""The part of preflight that needs all hosts at once: who is there, who reaches whom, whose clock and files differ.

The first host collects. Every host says `Here` and is told where the others listen, tries each of them, then checks itself and sends its
`Report`; all get the same verdict. The collector listens on the control port, which the frontend takes later.
"""

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterable

import msgspec
import zmq

from deepserve.control import dealer, secure_server
from launch.cluster import Cluster

MAX_CLOCK_S = 1.0  # by which clocks may differ
CONNECT_S = 5.0
REPORTS_S = 3600.0  # large models take a while to be hashed


class Here(msgspec.Struct, tag="here"):
    """A host has come, and listens on a port of its own for the others to try."""

    host: str
    port: int
    now_s: float  # time.time()


class Go(msgspec.Struct, tag="go"):
    """Everybody who came in time: host -> port."""

    ports: dict[str, int]


class Report(msgspec.Struct, tag="report"):
    """What one host found out about itself."""

    host: str
    versions: dict[str, str] = {}  # of what must be equal everywhere
    files: dict[str, str] = {}  # of the model: name -> SHA-256
    clashes: list[str] = []  # that concern it alone


class Verdict(msgspec.Struct, tag="verdict"):
    """Every clash of every host."""

    clashes: list[str]


class Collector(threading.Thread):
    """Runs on the first host beside its own member. Ends with the verdict."""

    def __init__(self, hosts: Iterable[str], address: str, *, secret: str, wait_s: float, reports_s: float = REPORTS_S):
        """Raises OSError when the address is taken."""
        super().__init__(daemon=True)
        self._hosts, self._wait_s, self._reports_s = list(hosts), wait_s, reports_s
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        secure_server(self._socket, secret)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy()
            raise OSError(f"cannot listen on {address}: {error}") from error
        self.address = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()

    def run(self) -> None:
        here: dict[str, tuple[bytes, Here]] = {}
        reports: dict[str, Report] = {}
        clashes = []
        for identity, message in self._messages(self._wait_s, lambda: len(here) < len(self._hosts)):
            if isinstance(message, Here) and message.host in self._hosts:
                apart_s = message.now_s - time.time()
                if abs(apart_s) > MAX_CLOCK_S:
                    clashes.append(f"the clock of {message.host} is {apart_s:+.1f} s off that of {self._hosts[0]}")
                here[message.host] = identity, message
        clashes += [f"{host} did not come within {self._wait_s:g} s" for host in self._hosts if host not in here]
        self._tell(here, Go({host: message.port for host, (_, message) in here.items()}))
        for _, message in self._messages(self._reports_s, lambda: len(reports) < len(here)):
            if isinstance(message, Report) and message.host in here:
                reports[message.host] = message
        clashes += [f"{host} sent no report within {self._reports_s:g} s" for host in here if host not in reports]
        self._tell(here, Verdict(clashes + compare([reports[host] for host in self._hosts if host in reports])))
        self._socket.close()
        self._context.term()

    def _messages(self, limit_s: float, more):
        deadline = time.monotonic() + limit_s
        while more() and self._socket.poll(max(0.0, deadline - time.monotonic()) * 1000):
            identity, payload = self._socket.recv_multipart()
            yield identity, msgspec.msgpack.decode(payload, type=Here | Report)

    def _tell(self, here: dict[str, tuple[bytes, Here]], message: Go | Verdict) -> None:
        for identity, _ in here.values():
            self._socket.send_multipart((identity, msgspec.msgpack.encode(message)))


class Member:
    """One host's part. Use as a context manager."""

    def __init__(self, host: str, collector: str, *, secret: str):
        self.host = host
        self._listener = socket.create_server((_ip_of(host), 0))
        self._context = zmq.Context()
        self._socket = dealer(self._context, secret=secret)
        self._socket.connect(collector)

    def __enter__(self) -> "Member":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._socket.close(0)
        self._context.term()

    def call(self, wait_s: float) -> list[str] | None:
        """Say that this host is here and try the others: clashes with them. None: the collector does not answer."""
        self._send(Here(self.host, self._listener.getsockname()[1], time.time()))
        go = self._receive(wait_s + CONNECT_S, Go)
        if go is None:
            return None
        return [problem for host, port in go.ports.items() if host != self.host and (problem := self._try(host, port))]

    def settle(self, report: Report) -> list[str] | None:
        """Send what this host found and wait for the verdict on all. None: the collector does not answer any more."""
        self._send(report)
        verdict = self._receive(REPORTS_S, Verdict)
        return None if verdict is None else verdict.clashes

    def _try(self, host: str, port: int) -> str:
        try:
            socket.create_connection((host, port), timeout=CONNECT_S).close()
        except OSError as error:
            return f"{self.host} cannot reach {host}: {error}"
        return ""

    def _send(self, message: Here | Report) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    def _receive(self, limit_s: float, kind: type):
        if not self._socket.poll(limit_s * 1000):
            return None
        return msgspec.msgpack.decode(self._socket.recv(), type=kind)


def compare(reports: list[Report]) -> list[str]:
    """Clashes of single hosts, with their names, and what differs between hosts. Pure."""
    clashes = [f"{report.host}: {clash}" for report in reports for clash in report.clashes]
    for what, field in (("version of", "versions"), ("model file", "files")):
        for name in sorted({name for report in reports for name in getattr(report, field)}):
            hosts: dict[str, list[str]] = defaultdict(list)
            for report in reports:
                hosts[getattr(report, field).get(name, "missing")].append(report.host)
            if len(hosts) > 1:
                kinds = "; ".join(f"{value[:16]} on {', '.join(where)}" for value, where in hosts.items())
                clashes.append(f"{what} {name} differs: {kinds}")
    return clashes


def collector_address(cluster: Cluster) -> str:
    """Where the first host collects."""
    return f"tcp://{_ip_of(cluster.hosts[0])}:{cluster.frontend.control_port}"


def _ip_of(host: str) -> str:
    return socket.gethostbyname(host)
