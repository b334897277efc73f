"""Starts and watches the ranks of one local instance. No torch: the frontend starts while its ranks load theirs."""

import subprocess
import sys

import msgspec

from deepserve.config import EngineArgs


class LocalInstance:
    """The engine processes of `deepserve serve`. They end with this process, even if it is killed: their stdin is the lifeline."""

    def __init__(self, args: EngineArgs, *, instance: str = "local"):
        self.args, self.instance = args, instance
        self._processes: list[subprocess.Popen] = []

    def start(self, frontend_address: str) -> None:
        """Start the ranks; they load, then register at the frontend's ZMQ address."""
        options = {"args": self.args, "frontends": [frontend_address], "instance": self.instance}
        command = [sys.executable, "-m", "deepserve.engine.loop"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert process.stdin is not None
        self._processes.append(process)
        process.stdin.write(msgspec.json.encode(options) + b"\n")
        process.stdin.flush()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def poll(self) -> int | None:
        """Exit code of the first rank that has ended, None while all live. Killed by a signal: 128 + its number."""
        for process in self._processes:
            code = process.poll()
            if code is not None:
                return 128 - code if code < 0 else code
        return None

    def stop(self, grace_s: float) -> None:
        """Close the lifelines and reap; what still lives after `grace_s` seconds is killed."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
