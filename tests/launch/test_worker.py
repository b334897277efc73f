"""What `launch.worker` refuses before it starts anything. What it runs is in tests/deepserve/test_rank_death.py."""

import os
import signal
import subprocess
import sys

import pytest

from deepserve.config import EngineArgs
from launch.worker import NEEDED, Guardian, Membership, check_workers, own_address

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
WAIT_S = 60.0


def worker(*flags: str, environment: dict[str, str]) -> subprocess.CompletedProcess:
    outside = {name: value for name, value in os.environ.items() if name not in NEEDED}
    command = [sys.executable, "-m", "launch.worker", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env={**outside, **environment})


def test_not_under_torchrun():
    ended = worker("--dp", "2", environment={})
    assert ended.returncode == 1
    assert "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: start this with torchrun" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("name", NEEDED)
def test_each_number_of_torchrun_is_needed(name: str):
    with pytest.raises(ValueError, match=f"^{name} not set"):
        Guardian(EngineArgs(data_parallel_size=4), {key: value for key, value in TORCHRUN.items() if key != name})


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (4, 2)])
def test_flags_and_number_of_workers_must_agree(dp: int, tp: int):
    ended = worker("--dp", str(dp), "--tp", str(tp), environment=TORCHRUN)
    assert ended.returncode == 1
    assert f"torchrun started 4 workers, but --data-parallel-size {dp} x --tensor-parallel-size {tp} needs {dp * tp}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_one_worker_holds_ranks_that_outlive_each_other():
    ended = worker("--dp", "4", "--on-rank-death", "replan", environment=TORCHRUN)
    assert ended.returncode == 1 and "torchrun started 4 workers, but with --on-rank-death replan one of them holds all" in ended.stderr
    check_workers(EngineArgs(data_parallel_size=4, on_rank_death="replan"), {**TORCHRUN, "WORLD_SIZE": "1"})


def test_flags_of_serve_are_checked_first():
    ended = worker("--tp", "3", environment=TORCHRUN)
    assert ended.returncode == 1
    assert "tensor_parallel_size 3 does not divide the model's 8 heads" in ended.stderr
    ended = worker("--no-such-flag", environment=TORCHRUN)
    assert ended.returncode == 2 and "--no-such-flag" in ended.stderr


@pytest.mark.parametrize("rank", range(4))
def test_rank_0_alone_runs_the_frontend(rank: int):
    for dp, tp in ((4, 1), (2, 2), (1, 4)):
        guardian = Guardian(EngineArgs(data_parallel_size=dp, tensor_parallel_size=tp), {**TORCHRUN, "RANK": str(rank)})
        assert guardian.rank == rank and guardian.follows == (rank > 0)


def test_a_guardian_never_loads_torch():
    """It is there to see a rank die; it shares none of what a rank can die of."""
    code = "import sys, launch.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=WAIT_S).returncode == 0


@pytest.mark.parametrize(
    ("secret", "instance", "sentence"),
    [("0" * 32, "nobody", "has no instance 'nobody'; it has: unified0"), ("short", "unified0", "the secret has 5 characters")],
)
def test_cluster_files_are_checked_first(tmp_path, secret: str, instance: str, sentence: str):
    path = tmp_path / "cluster.toml"
    path.write_text('secret_file = "secret"\n[[unified]]\n')
    (tmp_path / "secret").write_text(secret)
    ended = worker("--cluster", str(path), "--instance", instance, environment=TORCHRUN)
    assert ended.returncode == 1 and sentence in ended.stderr and "Traceback" not in ended.stderr


def test_members_of_a_cluster_follow_its_frontend():
    member = Membership("unified0", "unified", "tcp://127.0.0.1:1", "", 15.0)
    guardians = [Guardian(EngineArgs(data_parallel_size=4), {**TORCHRUN, "RANK": str(rank)}, member) for rank in range(4)]
    assert all(guardian.follows for guardian in guardians)


def test_a_rank_that_stays_suspended_is_ended(monkeypatch, capsys):
    monkeypatch.setattr("launch.worker.WATCH_S", 0.02)
    guardian = Guardian(EngineArgs(data_parallel_size=4), TORCHRUN, Membership("prefill0", "prefill", "tcp://127.0.0.1:1", "", 0.1))
    guardian._process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    for _ in range(4):
        guardian._process.send_signal(signal.SIGSTOP)
        assert [guardian._wait() for _ in range(4)] == [None] * 4
        guardian._process.send_signal(signal.SIGCONT)
        assert guardian._wait() is None, "it goes on in time"
    guardian._process.send_signal(signal.SIGSTOP)
    deaths = [guardian._wait() for _ in range(5)]
    assert deaths[:4] == [None] * 4 and deaths[4].code == 128 + signal.SIGKILL
    assert "rank 0 has been suspended for 0.1 s, it is ended" in capsys.readouterr().err
    guardian._process.stdin.close()


def test_the_address_that_peers_reach():
    assert own_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"MASTER_ADDR 'localhost' is 127.0.0.1 on this machine, which others cannot reach"):
        own_address("localhost")
    with pytest.raises(ValueError, match=r"no way from this machine to MASTER_ADDR 'no.such.name.invalid'"):
        own_address("no.such.name.invalid")
