"""What `launch slurm` and `launch k8s` write: run by a shell with Slurm's commands played, checked against Kubernetes' schema."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from launch.cluster import load
from launch.kubernetes import PodOptions, manifests
from launch.slurm import sbatch_script
from tests.launch.test_cluster import PD, launch, write

SCHEMA = json.loads((Path(__file__).parent / "kubernetes_schema.json").read_text())
OPTIONS = PodOptions("registry/deepserve:1", device_resource="example.com/device", model_claim="weights")
PODS = PD.replace('name = "pd"', 'name = "pd"\nmodel = "/models/big"').replace("[frontend]", '[frontend]\nlisten = "0.0.0.0"')

# Slurm's commands: the list of the allocation's machines, and a task on each of them.
SCONTROL = '#!/bin/bash\n[ "$*" = "show hostnames $SLURM_JOB_NODELIST" ] && printf "m1\\nm2\\nm3\\nm4\\n"\n'
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 99
shift
for name in m1 m2 m3 m4; do SLURMD_NODENAME=$name "$@" || exit $?; done
"""
PYTHON = '#!/bin/bash\necho "python $*"\n[ "$FAIL" != "$3" ]\n'


def play(folder: Path, script: str, fail: str = "") -> subprocess.CompletedProcess:
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("python", PYTHON)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLURM_JOB_NODELIST": "m[1-4]", "FAIL": fail}
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment)


def test_sbatch_script_checks_and_then_starts_every_machine(tmp_path):
    cluster = load(write(tmp_path, PD, "my cluster.toml"))
    script = sbatch_script(cluster, ["partition=gpu", "exclusive"])
    head = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert head == [f"#SBATCH --{o}" for o in ("job-name=pd", "nodes=4", "ntasks-per-node=1", "partition=gpu", "exclusive")]
    ran = play(tmp_path, script)
    assert ran.returncode == 0, ran.stderr
    file = tmp_path / "my cluster.toml"
    expected = [f"python -m launch {what} {file} --hosts m1,m2,m3,m4 --host m{n}" for what in ("preflight", "up") for n in range(1, 5)]
    assert ran.stdout.splitlines() == expected


def test_nothing_starts_after_a_failed_preflight(tmp_path):
    script = sbatch_script(load(write(tmp_path, PD)), [])
    ran = play(tmp_path, script, fail="preflight")
    assert ran.returncode == 1 and " up " not in ran.stdout


@pytest.mark.parametrize("option", ["nodes=3", "ntasks-per-node=2", "--partition=gpu", "a b", "x=1\nrm"])
def test_options_of_sbatch_are_checked(tmp_path, option):
    with pytest.raises(ValueError, match="--set"):
        sbatch_script(load(write(tmp_path, PD)), [option])


def documents(folder: Path, text: str = PODS, options: PodOptions = OPTIONS) -> dict[tuple[str, str], dict]:
    found = yaml.safe_load_all(manifests(load(write(folder, text)), options))
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def test_manifests_fit_the_schema(tmp_path):
    found = documents(tmp_path)
    sets = [("LeaderWorkerSet", f"pd-{name}") for name in ("prefill0", "decode0", "both")]
    assert list(found) == [("ConfigMap", "pd-cluster"), ("Deployment", "pd-frontend"), ("Service", "pd-frontend"), *sets]
    for document in found.values():
        jsonschema.validate(document, SCHEMA)
    sizes = {name: found[kind, name]["spec"]["leaderWorkerTemplate"]["size"] for kind, name in sets}
    assert sizes == {"pd-prefill0": 1, "pd-decode0": 2, "pd-both": 1}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "leaderWorkerTemplate", "size"), 0),
        (("spec", "leaderWorkerTemplate", "size"), "2"),
        (("spec", "leaderWorkerTemplate", "restartPolicy"), "Always"),
        (("spec", "leaderWorkerTemplate", "leader"), {}),
        (("spec", "replicas"), "1"),
        (("apiVersion",), "leaderworkerset.x-k8s.io/v2"),
        (("spec", "leaderWorkerTemplate", "workerTemplate", "spec", "containers"), []),
    ],
)
def test_the_schema_finds_mistakes(tmp_path, path, value):
    document = documents(tmp_path)["LeaderWorkerSet", "pd-decode0"]
    place = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)


def test_pods_of_an_instance(tmp_path):
    """The shell line becomes a torchrun line with the group's own addresses, and every mount has its volume."""
    document = documents(tmp_path)["LeaderWorkerSet", "pd-decode0"]
    pod = document["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"example.com/device": "4"}}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/etc/deepserve", "/models/big", "/dev/shm"}
    shell, flag, line = container["command"]
    for index, is_host in (("0", "true"), ("1", "false")):
        given = {"LWS_LEADER_ADDRESS": "pd-decode0-0.pd", "LWS_WORKER_INDEX": index, "POD_IP": "10.1.2.3", "PATH": os.environ["PATH"]}
        torchrun = tmp_path / "torchrun"
        torchrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        torchrun.chmod(0o755)
        given["PATH"] = f"{tmp_path}{os.pathsep}{given['PATH']}"
        words = subprocess.run([shell, flag, line], capture_output=True, text=True, env=given, check=True).stdout.splitlines()
        expected = (
            "--nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint pd-decode0-0.pd:29401 --rdzv-id pd-decode0 "
            f"--rdzv-conf is_host={is_host} --local-addr 10.1.2.3 -m launch.worker --cluster /etc/deepserve/cluster.toml "
            "--instance decode0 --frontend pd-frontend:29399"
        )
        assert words == shlex.split(expected)


def test_the_cluster_file_in_pods_is_the_cluster_file(tmp_path):
    found = documents(tmp_path)
    (tmp_path / "pod").mkdir()
    path = tmp_path / "pod/cluster.toml"
    path.write_text(found["ConfigMap", "pd-cluster"]["data"]["cluster.toml"])
    assert load(path).instances == load(tmp_path / "cluster.toml").instances
    sources = found["Deployment", "pd-frontend"]["spec"]["template"]["spec"]["volumes"][0]["projected"]["sources"]
    assert sources[1]["secret"]["items"] == [{"key": "secret", "path": "secret"}]
    text = manifests(load(tmp_path / "cluster.toml"), OPTIONS)
    assert text.startswith("# First: kubectl create secret generic pd-secret --from-file=secret\n")
    assert "0123456789abcdef" not in text, "the secret itself"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('listen = "0.0.0.0"', "", "a Service does not reach listen '127.0.0.1'"),
        ('secret_file = "secret"', 'secret_file = "/elsewhere/secret"', "secret_file '/elsewhere/secret' must lie beside the cluster file"),
        ('listen = "0.0.0.0"', 'listen = "0.0.0.0"\nport = 0', "port must be given"),
        ('"/models/big"', '"org/name"', "model 'org/name' is no absolute path"),
    ],
)
def test_what_cannot_run_in_pods_is_refused(tmp_path, old, new, sentence):
    assert old in PODS
    with pytest.raises(ValueError, match=sentence):
        documents(tmp_path, PODS.replace(old, new))


def test_pods_need_a_secret(tmp_path):
    with pytest.raises(ValueError, match="need a secret_file"):
        documents(tmp_path, "[[unified]]\n")


def test_command_lines(tmp_path):
    path = write(tmp_path, PODS)
    ended = launch("slurm", str(path), "--set", "partition=gpu")
    assert ended.returncode == 0 and "#SBATCH --partition=gpu\n" in ended.stdout
    ended = launch("k8s", str(path), "--image", "deepserve:1", "--device-resource", "example.com/device")
    assert ended.returncode == 0 and len(list(yaml.safe_load_all(ended.stdout))) == 6
    assert launch("k8s", str(path)).returncode == 2, "an image is needed"
