"""Hosts of a cluster as network namespaces on one machine, joined by a bridge on which this process sits too. Needs root on Linux.

Each has a boot id of its own, as hosts have: by that processes tell whether another one is on their machine.
"""

import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

_numbers = itertools.count()


def why_not() -> str:
    """The sentence that says why there can be no namespaces here, empty if there can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "network namespaces need Linux and the `ip` command"
    name = f"ds-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


class Network:
    """`num` hosts with the addresses `hosts`. A context manager."""

    def __init__(self, num: int):
        self._id = f"{os.getpid() % 100_000}{chr(ord('a') + next(_numbers))}"
        self._bridge = f"dsb{self._id}"
        subnet = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.hosts = [f"{subnet}.{number + 1}" for number in range(num)]
        self._names = {host: f"ds-{self._id}-{number}" for number, host in enumerate(self.hosts)}
        self._links = {host: f"dsv{self._id}{number}" for number, host in enumerate(self.hosts)}  # their ends on the bridge
        self._subnet = subnet
        self._folder = Path(tempfile.mkdtemp(prefix="deepserve-test-"))

    def __enter__(self) -> "Network":
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("address", "add", f"{self._subnet}.254/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for host, name in self._names.items():
                (self._folder / name).write_text(f"{uuid.uuid4()}\n")
                _ip("netns", "add", name)
                self._join(host, name)
                _ip("-n", name, "address", "add", f"{host}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _join(self, host: str, name: str) -> None:
        """Connect a namespace with the bridge."""
        _ip("link", "add", self._links[host], "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", self._links[host], "master", self._bridge, "up")

    def __exit__(self, *_: object) -> None:
        for command in (*(("netns", "delete", name) for name in self._names.values()), ("link", "delete", self._bridge)):
            subprocess.run(["ip", *command], capture_output=True)
        shutil.rmtree(self._folder)

    def on(self, host: str) -> list[str]:
        """Put before a command to run it on a host."""
        name = self._names[host]
        begin = f'mount --bind {self._folder / name} /proc/sys/kernel/random/boot_id && exec "$@"'
        return ["ip", "netns", "exec", name, "sh", "-c", begin, "sh"]

    def cut(self, host: str) -> None:
        """Nothing reaches the host any more, and nobody is told."""
        _ip("link", "set", self._links[host], "down")

    def mend(self, host: str) -> None:
        _ip("link", "set", self._links[host], "up")

    def sent_bytes(self, host: str) -> int:
        """What the host has put on the wire."""
        with open(f"/sys/class/net/{self._links[host]}/statistics/rx_bytes") as file:
            return int(file.read())


class SlowNetwork(Network):
    """One whose frames take `delay_s` each way, and get lost with probability `loss`, decided from `seed`.

    Hosts hang on a hub in this process instead of a bridge, since kernels that run tests often have no emulation of such links.
    """

    def __init__(self, num: int, *, delay_s: float, loss: float, seed: int = 0):
        super().__init__(num)
        self._hub = _Hub(delay_s, loss, seed)

    def _join(self, host: str, name: str) -> None:
        self._hub.plug(self._links[host], host)
        _ip("link", "set", self._links[host], "netns", name)
        _ip("-n", name, "link", "set", self._links[host], "name", "eth0")

    def __enter__(self) -> "SlowNetwork":
        super().__enter__()
        self._hub.plug(f"{self._bridge}t", "")
        _ip("link", "set", f"{self._bridge}t", "master", self._bridge, "up")
        self._hub.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._hub.stop()
        super().__exit__(*error)

    def cut(self, host: str) -> None:
        """See `Network`."""
        self._hub.cut.add(host)

    def mend(self, host: str) -> None:
        self._hub.cut.discard(host)

    def sent_bytes(self, host: str) -> int:
        """See `Network`."""
        return self._hub.sent_bytes[host]


class _Hub(threading.Thread):
    """Passes each Ethernet frame on to where its target was last heard, or to all."""

    def __init__(self, delay_s: float, loss: float, seed: int):
        super().__init__(daemon=True)
        self.cut: set[str] = set()
        self.sent_bytes: dict[str, int] = {}
        self._delay_s, self._loss, self._random = delay_s, loss, random.Random(seed)
        self._plugs: dict[int, str] = {}  # TAP device -> host
        self._homes: dict[bytes, int] = {}  # Ethernet address -> TAP device
        self._ended = threading.Event()

    def plug(self, device: str, host: str) -> None:
        """Make a TAP device; it may be moved to a namespace afterwards."""
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, 0x400454CA, struct.pack("16sH", device.encode(), 0x1002))  # TUNSETIFF, IFF_TAP | IFF_NO_PI
        self._plugs[tap] = host
        self.sent_bytes[host] = 0

    def run(self) -> None:
        queue: list[tuple[float, int, int, bytes]] = []  # when, in which order, from where, what
        order = itertools.count()
        while not self._ended.is_set():
            wait_s = 0.05 if not queue else min(0.05, max(0.0, queue[0][0] - time.monotonic()))
            for tap in select.select(list(self._plugs), [], [], wait_s)[0]:
                frame = os.read(tap, 1 << 16)
                self.sent_bytes[self._plugs[tap]] += len(frame)
                self._homes[frame[6:12]] = tap
                if self._random.random() >= self._loss:
                    heapq.heappush(queue, (time.monotonic() + self._delay_s, next(order), tap, frame))
            while queue and queue[0][0] <= time.monotonic():
                _, _, source, frame = heapq.heappop(queue)
                self._pass_on(source, frame)

    def _pass_on(self, source: int, frame: bytes) -> None:
        home = self._homes.get(frame[:6])
        for tap in [home] if home is not None else [tap for tap in self._plugs if tap != source]:
            if not {self._plugs[source], self._plugs[tap]} & self.cut:
                try:
                    os.write(tap, frame)
                except OSError:  # full, or not up yet: frames may get lost
                    continue

    def stop(self) -> None:
        self._ended.set()
        if self.is_alive():
            self.join()
        for tap in self._plugs:
            os.close(tap)
        self._plugs.clear()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
