"""Control sockets: what frontends and ranks say to each other, sealed by a shared secret where it leaves the machine.

CURVE keys come from the secret. A frontend's public key is told to nobody, so a peer that knows it knows the secret; everyone else fails
the handshake. Without a secret sockets are plain, and belong on loopback.
"""

import hmac
import logging
import os
import socket
import time
from contextlib import suppress

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger("deepserve.control")

MIN_SECRET_CHARS = 32
PROBE_MS = 1000  # between looks whether the other end of a connection still answers
LOG_EVERY_S = 10.0  # a stranger that tries without end must not fill the log
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


def check_secret(secret: str) -> None:
    """Raises ValueError for one that could be guessed; it is not repeated."""
    if len(secret) < MIN_SECRET_CHARS:
        raise ValueError(f"the secret has {len(secret)} characters, at least {MIN_SECRET_CHARS} are needed; openssl rand -hex 32 makes one")


def secure_server(sock: zmq.Socket, secret: str) -> None:
    """Before `bind`: only peers that know the secret get in."""
    if secret:
        sock.curve_server = True
        sock.curve_secretkey = _server_key(secret)


def secure_client(sock: zmq.Socket, secret: str) -> None:
    """Before `connect`: talk only to a server that knows the secret."""
    if secret:
        sock.curve_serverkey = zmq.curve_public(_server_key(secret))
        sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()


def notice_dead_links(sock: zmq.Socket, limit_s: float) -> None:
    """Before `bind` or `connect`: a connection whose other end has not answered for so long is closed, and made anew by who connects."""
    for option, value_ms in ((zmq.HEARTBEAT_IVL, PROBE_MS), (zmq.HEARTBEAT_TIMEOUT, limit_s * 1000), (zmq.HEARTBEAT_TTL, limit_s * 1000)):
        sock.setsockopt(option, int(value_ms))


def _server_key(secret: str) -> bytes:
    return z85.encode(hmac.digest(secret.encode(), b"deepserve control server", "sha256"))


class Doorman:
    """Logs connections that a listening socket refused. `read` it when `fd` says that there is news."""

    def __init__(self, sock: zmq.Socket):
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILURES
        self._monitored = sock
        self._monitor = sock.get_monitor_socket(events)
        self.fd = self._monitor.getsockopt(zmq.FD)
        self._unproven: dict[int, str] = {}  # descriptor -> address of who has not shown yet that it knows the secret
        self._logged_s = -LOG_EVERY_S
        self._num_unlogged = 0

    def read(self) -> None:
        """Take all news that is there."""
        while self._monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._unproven[event["value"]] = _peer(event["value"])
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                # The event does not say whose. A handshake takes moments, so it is most likely the latest one's.
                if self._unproven:
                    self._unproven.popitem()
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._refused(self._unproven.pop(event["value"], None))

    def _refused(self, peer: str | None) -> None:
        if peer is None:
            return
        now_s = time.monotonic()
        if now_s - self._logged_s < LOG_EVERY_S:
            self._num_unlogged += 1
            return
        more = f" ({self._num_unlogged} more since the last line)" if self._num_unlogged else ""
        log.warning("refused a connection from %s: it does not know the secret%s", peer, more)
        self._logged_s, self._num_unlogged = now_s, 0

    def close(self) -> None:
        self._monitored.disable_monitor()
        self._monitor.close(0)


def _peer(descriptor: int) -> str:
    """Address at the other end; a connection that is gone already has none any more."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as twin:
        return ":".join(map(str, twin.getpeername()[:2]))
    return "an unknown address"


class Line:
    """A rank's connection to one frontend. It is made anew whenever it breaks, and then what was said on the old one is void."""

    def __init__(self, context: zmq.Context, address: str, *, secret: str = "", dead_link_s: float | None = None):
        self.address = address
        self.socket = dealer(context, secret=secret, dead_link_s=dead_link_s)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILURES)
        self.socket.connect(address)  # now that the first connection will be noticed
        self._logged_s = -LOG_EVERY_S

    def read_news(self) -> tuple[bool, bool]:
        """Whether the connection broke, and whether there is a new one, since the last call."""
        broken = made = False
        while self.monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                made = True
            elif event == zmq.EVENT_DISCONNECTED:
                broken, made = True, False
            elif time.monotonic() - self._logged_s > LOG_EVERY_S:
                self._logged_s = time.monotonic()
                log.error("the frontend at %s refuses this rank: is the secret the same there?", self.address)
        return broken, made

    def close(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)


def dealer(context: zmq.Context, *, most_waiting: int = 0, secret: str = "", dead_link_s: float | None = None) -> zmq.Socket:
    """A rank's socket for a frontend, not connected yet.

    most_waiting: messages that may wait to be sent; 0: any number, since a frontend that reads slowly must not stop a step.
    """
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.SNDHWM, most_waiting)
    sock.setsockopt(zmq.RCVHWM, 0)
    secure_client(sock, secret)
    if dead_link_s is not None:
        notice_dead_links(sock, dead_link_s)
    return sock
