"""Command line of cluster tools: `python -m launch render | up | slurm | k8s | preflight`."""

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launch.preflight import HOME, ROOTS, installation, package_folder, preflight, root_clashes, verdict

if TYPE_CHECKING:
    from launch.cluster import Cluster


# Commands import what they need themselves: preflight comes before anything of ours is known to be ours.


def main(argv: list[str] | None = None) -> int:
    flags = _parser().parse_args(argv)
    try:
        status = flags.run(flags)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its end, when it flushes the rest
        return 1
    except ValueError as error:
        print(f"deepserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("deepserve: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launch", description="Clusters of deepserve.")
    subs = parser.add_subparsers(required=True)

    def command(name: str, run, help: str) -> argparse.ArgumentParser:
        sub = subs.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        return sub

    def with_cluster(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sub.add_argument("cluster", type=Path, help="cluster file")
        sub.add_argument("--hosts", type=lambda text: text.split(","), help="replaces the file's hosts: a,b,c")
        return sub

    with_cluster(command("render", _render, "print for each host what to start there"))
    up = with_cluster(command("up", _up, "start this host's share and watch it"))
    up.add_argument("--host", help="which of the hosts this is; default: the one whose address this machine has")
    slurm = with_cluster(command("slurm", _slurm, "print an sbatch script"))
    slurm.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a further option of sbatch, as partition=gpu")
    k8s = with_cluster(command("k8s", _k8s, "print Kubernetes manifests: LeaderWorkerSets, frontend, service"))
    k8s.add_argument("--image", required=True, help="container image with deepserve installed")
    k8s.add_argument("--device-resource", metavar="NAME", help="extended resource that each rank takes one of, as nvidia.com/gpu")
    k8s.add_argument("--model-claim", metavar="NAME", help="PersistentVolumeClaim to mount at the model's path")
    k8s.add_argument("--shared-memory", default="16Gi", metavar="SIZE", help="of /dev/shm in pods with ranks")
    check = command("preflight", _preflight, "check this machine, or all hosts of a cluster: run it on each of them at the same time")
    check.add_argument("cluster", type=Path, nargs="?", help="cluster file; without one: this machine and --model")
    check.add_argument("--model", type=Path, help="checkpoint folder; default: the shipped model")
    check.add_argument("--hosts", type=lambda text: text.split(","), help="replaces the file's hosts: a,b,c")
    check.add_argument("--host", help="which of the hosts this is; default: the one whose address this machine has")
    check.add_argument("--wait-s", type=float, default=60.0, metavar="SECONDS", help="for the other hosts to come")
    return parser


def _render(flags: argparse.Namespace) -> int:
    from launch.cluster import load
    from launch.commands import render

    print(render(load(flags.cluster, flags.hosts)))
    return 0


def _up(flags: argparse.Namespace) -> int:
    from launch.cluster import load
    from launch.commands import commands
    from launch.supervise import Supervisor

    cluster = load(flags.cluster, flags.hosts)
    cluster.secret()  # a bad one is told once, here
    host = _this_host(cluster, flags.host)
    share = commands(cluster, host)
    if not share:
        raise ValueError(f"{cluster.path} has nothing to run on {host}")
    _check_engines(cluster, host)
    limits = cluster.supervision
    return Supervisor(
        share,
        log_dir=cluster.log_dir,
        max_restarts=limits.max_restarts,
        stop_timeout_s=limits.stop_timeout_s,
        lease_s=cluster.lease_s,
    ).run()


def _check_engines(cluster: "Cluster", host: str) -> None:
    """What ranks of this host would refuse, each at each of its starts, is refused here, before a process starts. Raises ValueError."""
    from deepserve.config import EngineConfig
    from deepserve.model.config import ModelConfig
    from deepserve.model.hub import resolve_model
    from launch.host_check import transfer_clashes

    if clashes := transfer_clashes(cluster, host):
        raise ValueError(f"{cluster.path}: {clashes[0]}")
    for instance in cluster.instances:
        if host in instance.hosts:
            try:
                folder = str(resolve_model(cluster.model, instance.args.revision, with_weights=False))
                EngineConfig.resolve(instance.args, folder, ModelConfig.from_folder(folder))
            except ValueError as error:
                raise ValueError(f"{cluster.path}: {instance.name}: {error}") from None


def _slurm(flags: argparse.Namespace) -> int:
    from launch.cluster import load
    from launch.slurm import sbatch_script

    print(sbatch_script(load(flags.cluster, flags.hosts), flags.set), end="")
    return 0


def _k8s(flags: argparse.Namespace) -> int:
    from launch.cluster import load
    from launch.kubernetes import PodOptions, manifests

    options = PodOptions(flags.image, flags.device_resource, flags.model_claim, flags.shared_memory)
    print(manifests(load(flags.cluster, flags.hosts), options), end="")
    return 0


def _preflight(flags: argparse.Namespace) -> int:
    if flags.cluster is None:
        return preflight(flags.model)
    if flags.model is not None:
        raise ValueError("--model is for a machine alone: a cluster file names its model")
    if root_clashes(HOME, {name: package_folder(name) for name in ROOTS}):
        return verdict(installation()[1])  # a foreign package must not be run
    from launch.cluster import load
    from launch.host_check import preflight_host

    cluster = load(flags.cluster, flags.hosts)
    return preflight_host(cluster, _this_host(cluster, flags.host), flags.wait_s)


def _this_host(cluster: "Cluster", named: str | None) -> str:
    """Raises ValueError."""
    if named is not None:
        if named not in cluster.hosts:
            raise ValueError(f"--host {named} is none of the hosts {', '.join(cluster.hosts)}")
        return named
    mine = [host for host in cluster.hosts if _is_mine(host)]
    if len(mine) != 1:
        which = f"{', '.join(mine)} are all" if mine else f"none of {', '.join(cluster.hosts)} is"
        raise ValueError(f"{which} this machine: say which one it is with --host")
    return mine[0]


def _is_mine(host: str) -> bool:
    """Whether this machine has the address: only then can it listen there."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((socket.gethostbyname(host), 0))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
