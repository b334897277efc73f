"""The cluster file: which instances run on which hosts, as pure values. Nothing is started, connected or loaded here.

    name = "demo"
    model = "/models/DeepSeek-V3"
    hosts = ["10.0.0.1", "10.0.0.2"]
    secret_file = "secret.txt"
    [engine]                # options of every instance, by the names of `deepserve.config.EngineArgs`
    [frontend]
    [hand_off]              # of prompts, from prefill to decode instances
    [[prefill]]  [[decode]]  [[unified]]

Instances that name no hosts take the next ones of the list, prefill first, then decode, then unified.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec

from deepserve.config import EngineArgs
from deepserve.control import check_secret
from deepserve.server.dispatch import HandOffOptions
from hw.topology import ParallelConfig

ROLES = ("prefill", "decode", "unified")
RDZV_PORT = 29400  # of the first instance; the others take the ports behind it
CONTROL_PORT = 29399
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")  # of processes, folders and Kubernetes objects
_SET_BY_CLUSTER = ("model", "tensor_parallel_size", "data_parallel_size", "num_nodes")


class FrontendSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one HTTP server of a cluster. Fields that `deepserve serve` has too mean the same."""

    host: str = ""  # one of `hosts`; default: the first
    listen: str = "127.0.0.1"  # address for HTTP
    port: int = 8000
    control_port: int = CONTROL_PORT  # ranks connect there
    served_model_name: list[str] = []
    api_key_file: str | None = None  # one key a line
    admin_api_key_file: str | None = None  # the same, for commands; without it they are refused
    chat_template: str | None = None
    generation_config: str = "auto"
    max_concurrent_requests: int = 4096
    max_body_bytes: int = 16 << 20
    shutdown_timeout_s: float | None = None
    access_log: bool = False


class InstanceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One instance, as written; `Cluster` fills in what was left out."""

    name: str = ""  # default: role and number, `decode0`
    dp: int = 1
    tp: int = 1
    nodes: int = 1
    hosts: list[str] = []
    rdzv_port: int | None = None
    engine: dict[str, Any] = {}  # on top of the cluster's
    env: dict[str, str] = {}  # of its processes: which devices, which network interface


class Supervision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `launch up` does with the processes of a host."""

    max_restarts: int = 3  # of each process, in a row; 0: the first failure ends everything on its host
    stop_timeout_s: float = 30.0  # for instances to finish what runs
    log_dir: str = "logs"


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file itself."""

    name: str = "deepserve"
    model: str = "deepserve-tiny"
    hosts: list[str] = msgspec.field(default_factory=lambda: ["127.0.0.1"])
    secret_file: str | None = None
    lease_s: float = 15.0  # a rank that frontends have not heard of for so long is gone
    engine: dict[str, Any] = {}
    frontend: FrontendSpec = FrontendSpec()
    hand_off: HandOffOptions = HandOffOptions()
    supervision: Supervision = Supervision()
    prefill: list[InstanceSpec] = []
    decode: list[InstanceSpec] = []
    unified: list[InstanceSpec] = []


@dataclass(frozen=True)
class Instance:
    """One instance with everything filled in."""

    name: str
    role: str
    parallel: ParallelConfig
    hosts: tuple[str, ...]  # one for each node; torchrun numbers nodes by their addresses as text, and so does this
    rdzv_port: int
    args: EngineArgs
    env: dict[str, str]

    @property
    def rdzv_endpoint(self) -> str:
        return f"{self.hosts[0]}:{self.rdzv_port}"

    @property
    def workers_per_node(self) -> int:
        """That torchrun starts: one for each rank, or one that holds all of them, where they outlive each other."""
        return 1 if self.args.on_rank_death == "replan" else self.parallel.ranks_per_node


@dataclass(frozen=True)
class Membership:
    """What makes an instance part of a cluster."""

    instance: str
    role: str
    frontend: str  # ZMQ address
    secret: str
    lease_s: float


@dataclass(frozen=True)
class RankSpec:
    """One rank, where it runs and what it is."""

    instance: str
    role: str
    host: str
    node: int  # of the instance
    rank: int
    local_rank: int
    dp: int
    tp: int


@dataclass(frozen=True)
class Cluster:
    """A checked cluster file."""

    path: Path
    name: str
    model: str
    hosts: tuple[str, ...]
    hosts_given: bool  # not the file's, so whoever reads the file again must be given them too
    secret_file: Path | None
    lease_s: float
    frontend: FrontendSpec
    hand_off: HandOffOptions
    supervision: Supervision
    instances: tuple[Instance, ...]

    @property
    def is_local(self) -> bool:
        """Whether everything stays on loopback."""
        return all(is_loopback(host) for host in self.hosts)

    @property
    def num_engines(self) -> int:
        """Ranks that register at the frontend: one for each DP replica."""
        return sum(instance.parallel.dp for instance in self.instances)

    @property
    def control_address(self) -> str:
        """Where ranks find the frontend."""
        return f"tcp://{self.frontend.host}:{self.frontend.control_port}"

    @property
    def log_dir(self) -> Path:
        """Below the folder in which a host's processes are started."""
        return Path(self.supervision.log_dir)

    def instance(self, name: str) -> Instance:
        """Raises ValueError."""
        for instance in self.instances:
            if instance.name == name:
                return instance
        names = ", ".join(instance.name for instance in self.instances)
        raise ValueError(f"{self.path} has no instance {name!r}; it has: {names}")

    def ranks(self) -> Iterator[RankSpec]:
        """Every rank of every instance."""
        for instance in self.instances:
            for rank in range(instance.parallel.num_ranks):
                place = instance.parallel.place(rank)
                local = rank % instance.parallel.ranks_per_node
                yield RankSpec(instance.name, instance.role, instance.hosts[place.node], place.node, rank, local, place.dp, place.tp)

    def secret(self) -> str:
        """What the file holds, empty without one. Raises ValueError."""
        if self.secret_file is None:
            return ""
        secret = read_text(self.secret_file, "secret_file").strip()
        try:
            check_secret(secret)
        except ValueError as error:
            raise ValueError(f"{self.secret_file}: {error}") from None
        return secret

    @property
    def hands_off(self) -> bool:
        """Whether pages travel between instances."""
        return any(instance.role != "unified" for instance in self.instances)


def load(path: str | Path, hosts: list[str] | None = None) -> Cluster:
    """Read and check a cluster file. Raises ValueError.

    hosts: stand in for the file's, one for one, for schedulers that pick machines; the file's are mere names then.
    """
    path = Path(path)
    text = read_text(path, "cluster file")
    try:
        file = msgspec.toml.decode(text, type=ClusterFile)
        return _resolve(path.absolute(), _with_hosts(file, hosts) if hosts else file, hosts_given=bool(hosts))
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def read_text(path: Path, what: str) -> str:
    """Raises ValueError with a sentence."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"{what} {path} cannot be read: {reason}") from None


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_hosts(file: ClusterFile, hosts: list[str]) -> ClusterFile:
    if len(hosts) != len(file.hosts):
        raise ValueError(f"it has {len(file.hosts)} hosts, {len(hosts)} were given: {','.join(hosts)}")
    stands_for = dict(zip(file.hosts, hosts, strict=True))
    replace = msgspec.structs.replace

    def moved(specs: list[InstanceSpec]) -> list[InstanceSpec]:
        return [replace(spec, hosts=[stands_for.get(host, host) for host in spec.hosts]) for spec in specs]

    frontend = replace(file.frontend, host=stands_for.get(file.frontend.host, file.frontend.host))
    instances = {role: moved(getattr(file, role)) for role in ROLES}
    return replace(file, hosts=hosts, frontend=frontend, **instances)


def _resolve(path: Path, file: ClusterFile, *, hosts_given: bool) -> Cluster:
    _check_name("name", file.name)
    if not file.hosts or "" in file.hosts or len(set(file.hosts)) < len(file.hosts):
        raise ValueError(f"hosts must name different machines, at least one, got {file.hosts}")
    for host in file.hosts:
        if ":" in host:
            raise ValueError(f"hosts must be names or IPv4 addresses, got {host!r}")
    if not 1.0 <= file.lease_s < float("inf"):
        raise ValueError(f"lease_s must be at least 1, got {file.lease_s}")
    if file.supervision.max_restarts < 0 or not file.supervision.stop_timeout_s >= 0:
        raise ValueError("supervision: max_restarts and stop_timeout_s must be at least 0")
    frontend = msgspec.structs.replace(file.frontend, host=file.frontend.host or file.hosts[0])
    if frontend.host not in file.hosts:
        raise ValueError(f"frontend: host {frontend.host!r} is not in hosts {file.hosts}")
    cluster = Cluster(
        path=path,
        name=file.name,
        model=file.model,
        hosts=tuple(file.hosts),
        hosts_given=hosts_given,
        secret_file=None if file.secret_file is None else path.parent / file.secret_file,
        lease_s=file.lease_s,
        frontend=frontend,
        hand_off=file.hand_off,
        supervision=file.supervision,
        instances=tuple(_instances(file)),
    )
    if not cluster.is_local and cluster.secret_file is None:
        raise ValueError("hosts beyond this machine need a secret_file: their control sockets are open to the network")
    _check_ports(cluster)
    return cluster


def _instances(file: ClusterFile) -> Iterator[Instance]:
    written = [(role, number, spec) for role in ROLES for number, spec in enumerate(getattr(file, role))]
    if not written:
        raise ValueError("there is no instance: write [[unified]], or [[prefill]] and [[decode]]")
    if bool(file.prefill) != bool(file.decode):
        there, missing = ("prefill", "decode") if file.prefill else ("decode", "prefill")
        raise ValueError(f"[[{there}]] instances need [[{missing}]] instances beside them")
    names: set[str] = set()
    free_hosts = iter(file.hosts)
    for index, (role, number, spec) in enumerate(written):
        name = spec.name or f"{role}{number}"
        _check_name(f"{role} {number}: name", name)
        if name in names or name == "frontend":
            raise ValueError(f"{role} {number}: the name {name!r} is taken")
        names.add(name)
        try:
            yield Instance(
                name=name,
                role=role,
                parallel=ParallelConfig(dp=spec.dp, tp=spec.tp, nodes=spec.nodes),
                hosts=tuple(sorted(_hosts(file, spec, free_hosts))),
                rdzv_port=RDZV_PORT + index if spec.rdzv_port is None else spec.rdzv_port,
                args=_engine_args(file, role, spec),
                env=spec.env,
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def _hosts(file: ClusterFile, spec: InstanceSpec, free_hosts: Iterator[str]) -> list[str]:
    if not spec.hosts and len(file.hosts) == 1:
        hosts = file.hosts[:1]  # a cluster of one machine shares it
    else:
        hosts = spec.hosts or [host for _, host in zip(range(spec.nodes), free_hosts, strict=False)]
        if not spec.hosts and len(hosts) < spec.nodes:
            raise ValueError(f"{spec.nodes} nodes, but only {len(hosts)} of the {len(file.hosts)} hosts are left for it")
    if len(hosts) != spec.nodes:
        raise ValueError(f"{spec.nodes} nodes on {len(hosts)} hosts {hosts}")
    strangers = [host for host in hosts if host not in file.hosts]
    if strangers or len(set(hosts)) < len(hosts):
        raise ValueError(f"hosts {hosts} must be different ones of {file.hosts}")
    return hosts


def _engine_args(file: ClusterFile, role: str, spec: InstanceSpec) -> EngineArgs:
    options = {**file.engine, **spec.engine}
    unknown = [name for name in options if name not in EngineArgs.__struct_fields__]
    if unknown:
        raise ValueError(f"engine has no option {unknown[0]!r}")
    placed = [name for name in options if name in _SET_BY_CLUSTER]
    if placed:
        raise ValueError(f"engine option {placed[0]!r} follows from model, dp, tp and nodes")
    if options.get("on_rank_death") == "replan" and role != "unified" and spec.tp > 1:
        # Ranks of a TP group hear of each other's writes through it, and a death elsewhere in the instance closes it half-way.
        raise ValueError(f"engine: on_rank_death 'replan' needs tp 1 where pages are handed off, this {role} instance has tp {spec.tp}")
    try:
        return msgspec.convert(
            {**options, "model": file.model, "data_parallel_size": spec.dp, "tensor_parallel_size": spec.tp, "num_nodes": spec.nodes},
            EngineArgs,
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"engine: {error}") from None


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what} must be up to 40 small letters, digits and hyphens, got {name!r}")


def _check_ports(cluster: Cluster) -> None:
    """Ports are taken on the frontend's host and on the first host of each instance."""
    frontend = cluster.frontend
    wanted = [(frontend.host, frontend.control_port, "frontend: control_port")]
    if frontend.port:
        wanted.append((frontend.host, frontend.port, "frontend: port"))
    wanted += [(instance.hosts[0], instance.rdzv_port, f"{instance.name}: rdzv_port") for instance in cluster.instances]
    taken: dict[tuple[str, int], str] = {}
    for host, port, what in wanted:
        if not 0 < port < 1 << 16:
            raise ValueError(f"{what} must be from 1 to 65535, got {port}")
        other = taken.setdefault((host, port), what)
        if other != what:
            raise ValueError(f"{what} {port} is taken on {host} by {other}")
