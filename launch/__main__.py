"""Command line of cluster tools: `python -m launch render | up | slurm | k8s | preflight`."""

import argparse
import socket
import sys
from pathlib import Path

from launch.cluster import Cluster, load
from launch.commands import commands, render
from launch.kubernetes import PodOptions, manifests
from launch.preflight import preflight
from launch.slurm import sbatch_script
from launch.supervise import Supervisor


def main(argv: list[str] | None = None) -> int:
    flags = _parser().parse_args(argv)
    try:
        return flags.run(flags)
    except ValueError as error:
        print(f"deepserve: {error}", file=sys.stderr)
        return 1


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
    check = command("preflight", _preflight, "check packages, library versions and the model folder of this machine")
    check.add_argument("--model", type=Path, help="checkpoint folder; default: the shipped model")
    return parser


def _render(flags: argparse.Namespace) -> int:
    print(render(load(flags.cluster, flags.hosts)))
    return 0


def _up(flags: argparse.Namespace) -> int:
    cluster = load(flags.cluster, flags.hosts)
    cluster.check_roles()
    cluster.secret()  # a bad one is told once, here
    host = _this_host(cluster, flags.host)
    share = commands(cluster, host)
    if not share:
        raise ValueError(f"{cluster.path} has nothing to run on {host}")
    limits = cluster.supervision
    return Supervisor(share, log_dir=cluster.log_dir, max_restarts=limits.max_restarts, stop_timeout_s=limits.stop_timeout_s).run()


def _slurm(flags: argparse.Namespace) -> int:
    print(sbatch_script(load(flags.cluster, flags.hosts), flags.set), end="")
    return 0


def _k8s(flags: argparse.Namespace) -> int:
    options = PodOptions(flags.image, flags.device_resource, flags.model_claim, flags.shared_memory)
    print(manifests(load(flags.cluster, flags.hosts), options), end="")
    return 0


def _preflight(flags: argparse.Namespace) -> int:
    return preflight(flags.model)


def _this_host(cluster: Cluster, named: str | None) -> str:
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
