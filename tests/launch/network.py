"""Hosts of a cluster as network namespaces on one machine, joined by a bridge on which this process sits too. Needs root on Linux."""

import itertools
import os
import shutil
import subprocess
import sys

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

    def __enter__(self) -> "Network":
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("address", "add", f"{self._subnet}.254/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for host, name in self._names.items():
                _ip("netns", "add", name)
                _ip("link", "add", self._links[host], "type", "veth", "peer", "name", "eth0", "netns", name)
                _ip("link", "set", self._links[host], "master", self._bridge, "up")
                _ip("-n", name, "address", "add", f"{host}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for command in (*(("netns", "delete", name) for name in self._names.values()), ("link", "delete", self._bridge)):
            subprocess.run(["ip", *command], capture_output=True)

    def on(self, host: str) -> list[str]:
        """Put before a command to run it on a host."""
        return ["ip", "netns", "exec", self._names[host]]

    def cut(self, host: str) -> None:
        """Nothing reaches the host any more, and nobody is told."""
        _ip("link", "set", self._links[host], "down")

    def mend(self, host: str) -> None:
        _ip("link", "set", self._links[host], "up")

    def sent_bytes(self, host: str) -> int:
        """What the host has put on the wire."""
        with open(f"/sys/class/net/{self._links[host]}/statistics/rx_bytes") as file:
            return int(file.read())


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
