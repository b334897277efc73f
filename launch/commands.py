"""What to start on a host: the frontend's command and one torchrun line for each instance that has ranks there. Pure."""

import shlex
from dataclasses import dataclass

from launch.cluster import Cluster, Instance

TORCHRUN_STOP_S = 30.0  # that torchrun gives its workers to end, unless its environment says otherwise


@dataclass(frozen=True)
class Command:
    """One process of a host; it may have children of its own."""

    name: str  # "frontend", or the instance and its node
    argv: tuple[str, ...]
    env: dict[str, str]  # on top of the environment

    def __str__(self) -> str:
        """As a line for a shell."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*settings, shlex.join(self.argv)])


def commands(cluster: Cluster, host: str) -> list[Command]:
    """Everything that runs on `host`, the frontend first."""
    found = [frontend_command(cluster)] if cluster.frontend.host == host else []
    for instance in cluster.instances:
        found += [torchrun_command(cluster, instance, node) for node, each in enumerate(instance.hosts) if each == host]
    return found


def frontend_command(cluster: Cluster) -> Command:
    return Command("frontend", ("python", "-m", "launch.frontend", *_cluster_flags(cluster)), {})


def torchrun_command(cluster: Cluster, instance: Instance, node: int) -> Command:
    """The line for one node of an instance."""
    name = instance.name if instance.parallel.nodes == 1 else f"{instance.name}-node{node}"
    argv = (
        *("torchrun", "--nnodes", str(instance.parallel.nodes), "--nproc-per-node", str(instance.workers_per_node)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", instance.rdzv_endpoint, "--rdzv-id", f"{cluster.name}-{instance.name}"),
        # Said outright, since torchrun does not recognise every address of its own machine.
        *("--rdzv-conf", f"is_host={str(node == 0).lower()}", "--local-addr", instance.hosts[node]),
        *("--role", f"{name}.", "--tee", "3", "--log-dir", str(cluster.log_dir / name)),
        *("-m", "launch.worker", *_cluster_flags(cluster), "--instance", instance.name),
    )
    stop_s = cluster.supervision.stop_timeout_s
    patience = {} if stop_s == TORCHRUN_STOP_S else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{stop_s:.0f}"}
    return Command(name, argv, {**patience, **instance.env})


def render(cluster: Cluster) -> str:
    """All hosts' lines, as a script that a person reads and copies from."""
    parts = []
    for host in cluster.hosts:
        found = commands(cluster, host)
        parts.append(f"# on {host}" if found else f"# on {host}: nothing")
        parts += [f"{command}" for command in found]
    return "\n".join(parts)


def _cluster_flags(cluster: Cluster) -> tuple[str, ...]:
    flags = ("--cluster", str(cluster.path))
    return (*flags, "--hosts", ",".join(cluster.hosts)) if cluster.hosts_given else flags
