"""For every test: random numbers that depend on its name only, one torch thread, and no process left behind at the end."""

import random
import sys
import zlib
from collections.abc import Callable

import psutil
import pytest

from hw.testing import available_backends, num_devices
from tests.hw.ranks import Ranks

# These are about accelerators and nothing else; on a machine without one, or without two, there is nothing to run.
_MOST = max((num_devices(name) for name in available_backends() if name != "cpu"), default=0)
_ON_DEVICES = ["hw/test_cuda.py", "hw/test_cuda_small.py", "deepserve/engine/test_engine_devices.py", "deepserve/pd/test_device.py"]
collect_ignore = [*_ON_DEVICES] if _MOST < 1 else []
collect_ignore += ["hw/test_cuda_ranks.py", "deepserve/test_device_ranks.py"] if _MOST < 2 else []


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds every generator from the test's id, so a test gives the same numbers alone and in any order."""
    value = zlib.crc32(request.node.nodeid.encode())
    random.seed(value)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(value)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(value)
        torch.set_num_threads(1)  # the matrices are small; on a busy machine a second thread costs more than it does
    return value


@pytest.fixture(autouse=True, scope="session")
def no_process_left():
    """Set up before any other fixture, hence torn down after all of them: a child that still runs is a test's mistake."""
    before = set(psutil.Process().children(recursive=True))
    yield
    children = [child for child in psutil.Process().children(recursive=True) if child not in before]
    # Python's own helper of the "spawn" start method lives until the interpreter exits.
    children = [child for child in children if not any("resource_tracker" in word for word in _command(child))]
    _, alive = psutil.wait_procs(children, timeout=5)
    left = [f"{child.pid}: {' '.join(_command(child))}" for child in alive]
    for child in alive:
        child.kill()
    assert not left, "processes left by the tests:\n" + "\n".join(left)


@pytest.fixture(scope="session")
def ranks_of(no_process_left: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Ranks]:
    """`ranks_of(3)`: processes that form groups, for tests that leave them as they were; up to four, started once."""
    made: list[Ranks] = []

    def get(size: int) -> Ranks:
        if not made:
            made.append(Ranks(4, tmp_path_factory.mktemp("ranks")))
        return made[0].first(size)

    yield get
    for ranks in made:
        ranks.close()


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
