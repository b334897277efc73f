"""The cluster file: what it says, what it refuses, and the lines that follow from it. Nothing is started."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cluster import Cluster, is_loopback, load
from launch.commands import commands, render, torchrun_command

ROOT = Path(__file__).resolve().parents[2]
SECRET = "0123456789abcdef0123456789abcdef"
PD = """
name = "pd"
hosts = ["10.0.0.3", "10.0.0.1", "10.0.0.2", "10.0.0.10"]
secret_file = "secret"
[engine]
max_num_seqs = 32
[frontend]
host = "10.0.0.1"
[hand_off]
max_local_prefill_tokens = 7
[[decode]]
dp = 4
tp = 2
nodes = 2
engine = { max_num_seqs = 64 }
[[prefill]]
tp = 4
[[unified]]
name = "both"
hosts = ["10.0.0.1"]
env = { WHICH = "two words" }
"""


def write(folder: Path, text: str, name: str = "cluster.toml") -> Path:
    path = folder / name
    path.write_text(text)
    (folder / "secret").write_text(SECRET + "\n")
    return path


@pytest.fixture
def pd(tmp_path) -> Cluster:
    return load(write(tmp_path, PD))


def test_instances_take_hosts_in_order_of_role(pd):
    found = {i.name: (i.role, i.hosts, i.rdzv_port, i.parallel.dp, i.parallel.tp, i.args.max_num_seqs) for i in pd.instances}
    assert found == {
        "prefill0": ("prefill", ("10.0.0.3",), 29400, 1, 4, 32),
        "decode0": ("decode", ("10.0.0.1", "10.0.0.2"), 29401, 4, 2, 64),
        "both": ("unified", ("10.0.0.1",), 29402, 1, 1, 32),
    }
    assert pd.num_engines == 1 + 4 + 1
    assert pd.control_address == "tcp://10.0.0.1:29399"
    assert pd.secret() == SECRET
    assert pd.hands_off and (pd.hand_off.lease_s, pd.hand_off.max_local_prefill_tokens) == (15.0, 7)


def test_ranks_of_every_instance(pd):
    ranks = [(r.instance, r.host, r.node, r.rank, r.local_rank, r.dp, r.tp) for r in pd.ranks()]
    assert ranks == [
        *(("prefill0", "10.0.0.3", 0, i, i, 0, i) for i in range(4)),
        *(("decode0", "10.0.0.1", 0, i, i, i // 2, i % 2) for i in range(4)),
        *(("decode0", "10.0.0.2", 1, 4 + i, i, 2 + i // 2, i % 2) for i in range(4)),
        ("both", "10.0.0.1", 0, 0, 0, 0, 0),
    ]


def test_lines_of_each_host(pd):
    assert [command.name for host in pd.hosts for command in commands(pd, host)] == [
        "prefill0", "frontend", "decode0-node0", "both", "decode0-node1",
    ]  # fmt: skip
    line = str(torchrun_command(pd, pd.instance("decode0"), 1))
    assert line == (
        "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29401 --rdzv-id pd-decode0 "
        "--rdzv-conf is_host=false --local-addr 10.0.0.2 --role decode0-node1. --tee 3 --log-dir logs/decode0-node1 "
        f"-m launch.worker --cluster {pd.path} --instance decode0"
    )
    assert str(torchrun_command(pd, pd.instance("both"), 0)).startswith("WHICH='two words' torchrun ")
    script = render(pd)
    assert script.count("torchrun") == 4 and script.count("launch.frontend") == 1 and "# on 10.0.0.10: nothing" in script


def test_one_worker_holds_ranks_that_outlive_each_other(tmp_path):
    cluster = load(write(tmp_path, '[[unified]]\ndp = 3\nengine = { on_rank_death = "replan" }\n'))
    assert "--nnodes 1 --nproc-per-node 1 " in render(cluster) and cluster.num_engines == 3


def test_torchrun_takes_every_flag(pd):
    """Its own parser reads the printed line, down to the worker's arguments."""
    from torch.distributed.run import get_args_parser

    words = shlex.split(str(torchrun_command(pd, pd.instance("decode0"), 0)))
    parsed = get_args_parser().parse_args(words[1:])
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_id) == ("2", "4", "pd-decode0")
    assert parsed.training_script == "launch.worker" and parsed.training_script_args[-2:] == ["--instance", "decode0"]


def test_hosts_can_be_given_by_a_scheduler(tmp_path):
    """The file's hosts are mere names then."""
    text = 'hosts = ["x", "y"]\nsecret_file = "secret"\n[frontend]\nhost = "y"\n[[unified]]\nnodes = 2\ndp = 2\n'
    path = write(tmp_path, text + '[[unified]]\nhosts = ["y"]\n')
    cluster = load(path, ["node7", "node3"])
    assert [instance.hosts for instance in cluster.instances] == [("node3", "node7"), ("node3",)]
    assert cluster.frontend.host == "node3"
    with pytest.raises(ValueError, match="it has 2 hosts, 3 were given: a,b,c"):
        load(path, ["a", "b", "c"])
    started = [line for line in render(cluster).splitlines() if not line.startswith("#")]
    assert len(started) == 4 and all("--hosts node7,node3" in line for line in started)


def test_one_host_is_shared(tmp_path):
    cluster = load(write(tmp_path, "[[unified]]\n[[unified]]\ndp = 2\n"))
    assert [instance.hosts for instance in cluster.instances] == [("127.0.0.1",)] * 2
    assert cluster.is_local and cluster.secret() == "" and not cluster.hands_off


REFUSED = {
    "not toml": ("name = ", "Invalid value"),
    "unknown field": ("colour = 1\n[[unified]]", "unknown field `colour`"),
    "unknown field of an instance": ("[[unified]]\ndpp = 2", "unknown field `dpp`"),
    "wrong type": ('[[unified]]\ndp = "two"', "Expected `int`, got `str`"),
    "no instance": ("", "there is no instance"),
    "prefill alone": ("[[prefill]]", r"\[\[prefill\]\] instances need \[\[decode\]\] instances"),
    "decode alone": ("[[decode]]", r"\[\[decode\]\] instances need \[\[prefill\]\] instances"),
    "dp": ("[[unified]]\ndp = 0", "unified0: dp must be at least 1, got 0"),
    "ranks over nodes": ('hosts = ["127.0.0.1", "127.0.0.2"]\n[[unified]]\ndp = 3\nnodes = 2', r"3 ranks .* do not divide over 2 nodes"),
    "hosts left": ('hosts = ["127.0.0.1", "127.0.0.2"]\n[[unified]]\ndp = 2\nnodes = 2\n[[unified]]', "unified1: 1 nodes, but only 0 of"),
    "one host for two nodes": ("[[unified]]\ndp = 2\nnodes = 2", "2 nodes on 1 hosts"),
    "unknown host": ('[[unified]]\nhosts = ["a"]', r"hosts \['a'\] must be different ones of"),
    "IPv6": ('hosts = ["::1"]\n[[unified]]', "hosts must be names or IPv4 addresses, got '::1'"),
    "twice the same host": ('hosts = ["127.0.0.1", "127.0.0.1"]\n[[unified]]', "hosts must name different machines"),
    "names": ('[[unified]]\nname = "a"\n[[unified]]\nname = "a"', "the name 'a' is taken"),
    "frontend's name": ('[[unified]]\nname = "frontend"', "the name 'frontend' is taken"),
    "shape of a name": ('[[unified]]\nname = "Big Name"', "small letters, digits and hyphens, got 'Big Name'"),
    "cluster's name": ('name = "x/y"\n[[unified]]', "name must be .* got 'x/y'"),
    "engine option": ("[engine]\nmax_num_sequences = 4\n[[unified]]", "engine has no option 'max_num_sequences'"),
    "engine option's type": ('[[unified]]\nengine = { max_num_seqs = "many" }', "engine: Expected `int`, got `str`"),
    "engine option that follows": ("[engine]\ntensor_parallel_size = 4\n[[unified]]", "follows from model, dp, tp and nodes"),
    "TP ranks that go on": (
        '[engine]\non_rank_death = "replan"\n[[prefill]]\ntp = 2\n[[decode]]\n',
        "prefill0: engine: on_rank_death 'replan' needs tp 1 where pages are handed off, this prefill instance has tp 2",
    ),
    "frontend's host": ('[frontend]\nhost = "b"\n[[unified]]', "host 'b' is not in hosts"),
    "ports": ("[frontend]\nport = 29400\n[[unified]]", "unified0: rdzv_port 29400 is taken on 127.0.0.1 by frontend: port"),
    "port range": ("[[unified]]\nrdzv_port = 70000", "unified0: rdzv_port must be from 1 to 65535, got 70000"),
    "lease": ("lease_s = 0.1\n[[unified]]", "lease_s must be at least 1, got 0.1"),
    "lease of a hand-off": ("[hand_off]\nlease_s = 0.1\n[[unified]]", "hand_off: lease_s must be at least 1, got 0.1"),
    "restarts": ("[supervision]\nmax_restarts = -1\n[[unified]]", "must be at least 0"),
    "no secret": ('hosts = ["10.0.0.1"]\n[[unified]]', "hosts beyond this machine need a secret_file"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_a_sentence(tmp_path, text, sentence):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=sentence) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"cluster file .*nowhere.toml cannot be read: No such file"):
        load(tmp_path / "nowhere.toml")
    path = write(tmp_path, 'secret_file = "nothing"\n[[unified]]')
    with pytest.raises(ValueError, match=r"secret_file .*nothing cannot be read"):
        load(path).secret()
    (tmp_path / "nothing").write_text("short\n")
    with pytest.raises(ValueError, match="nothing: the secret has 5 characters"):
        load(path).secret()


def test_unknown_instance(pd):
    with pytest.raises(ValueError, match="has no instance 'decode7'; it has: prefill0, decode0, both"):
        pd.instance("decode7")


@pytest.mark.parametrize(
    ("host", "is_one"), [("localhost", True), ("127.0.0.9", True), ("::1", True), ("10.0.0.1", False), ("node1", False)]
)
def test_loopback(host, is_one):
    assert is_loopback(host) == is_one


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.stem)
def test_examples_are_right(path):
    assert render(load(path))


def launch(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "launch", *words], cwd=ROOT, capture_output=True, text=True)


def test_render_prints_what_runs_where(tmp_path, pd):
    ended = launch("render", str(pd.path))
    assert ended.returncode == 0 and ended.stdout == render(pd) + "\n"


def test_a_reader_that_has_read_enough_is_no_traceback(pd):
    """As `launch render ... | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        ended = subprocess.run([sys.executable, "-m", "launch", "render", str(pd.path)], cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE)
    assert ended.returncode == 1 and ended.stderr == b""


def test_up_needs_to_know_which_host_this_is(tmp_path):
    path = write(tmp_path, 'hosts = ["127.0.0.1", "127.0.0.2"]\n[[unified]]\n')
    ended = launch("up", str(path))
    assert ended.returncode == 1 and "127.0.0.1, 127.0.0.2 are all this machine: say which one it is with --host" in ended.stderr
    ended = launch("up", str(path), "--host", "127.0.0.2")
    assert ended.returncode == 1 and "has nothing to run on 127.0.0.2" in ended.stderr
    ended = launch("up", str(path), "--host", "127.0.0.3")
    assert ended.returncode == 1 and "--host 127.0.0.3 is none of the hosts" in ended.stderr
    ended = launch("up", str(path), "--hosts", "192.0.2.1,192.0.2.2")
    assert ended.returncode == 1 and "need a secret_file" in ended.stderr


def test_up_starts_nothing_that_its_ranks_would_refuse(tmp_path):
    path = write(tmp_path, "[[prefill]]\n[[decode]]\ntp = 3\n")
    ended = launch("up", str(path))
    assert ended.returncode == 1
    assert ended.stderr == f"deepserve: {path}: decode0: tensor_parallel_size 3 does not divide the model's 8 heads\n"
    assert not ended.stdout
