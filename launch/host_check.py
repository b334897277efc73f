"""Preflight of one host of a cluster: devices, ports, shared memory, the model's files; then what all hosts find together."""

import hashlib
import os
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import msgspec

from deepserve.model.hub import resolve_model
from launch.cluster import Cluster
from launch.preflight import installation, model_clashes, verdict
from launch.rollcall import Collector, Member, Report, collector_address

HASHED = ("*.json", "*.jinja", "*.safetensors")
# Libraries of device collectives keep their buffers there; containers start with 64 MiB.
MIN_SHARED_BYTES = 1 << 30


def preflight_host(cluster: Cluster, host: str, wait_s: float) -> int:
    """Run it on every host at the same time; returns the exit code, 1 for clashes of any host.

    wait_s: by which the other hosts may come later than this one.
    """
    versions, clashes = installation()
    return verdict(_of_cluster(cluster, Report(host, versions, clashes=clashes), wait_s))


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that loading reads, by name; several at a time, as fast as the disk gives them."""
    paths = sorted(path for pattern in HASHED for path in folder.glob(pattern))

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip([path.name for path in paths], pool.map(digest, paths), strict=True))


def port_clashes(cluster: Cluster, host: str) -> list[str]:
    """Ports that a cluster takes on this host and that somebody else has. The control port is the roll call's to try."""
    wanted = [
        ("127.0.0.1" if cluster.is_local else "", i.rdzv_port, f"rendezvous of {i.name}") for i in cluster.instances if i.hosts[0] == host
    ]
    if cluster.frontend.host == host and cluster.frontend.port:
        wanted.append((cluster.frontend.listen, cluster.frontend.port, "frontend"))
    if cluster.frontend.host == host and (len(cluster.hosts) == 1 or host != cluster.hosts[0]):
        wanted.append((host, cluster.frontend.control_port, "control port"))
    clashes = []
    for address, port, what in wanted:
        try:
            socket.create_server((address, port)).close()
        except OSError as error:
            clashes.append(f"port {port} ({what}) cannot be taken: {os.strerror(error.errno)}")
    return clashes


def device_clashes(cluster: Cluster, host: str) -> tuple[list[str], dict[str, str]]:
    """Too few devices for the ranks of this host, and the versions of their drivers."""
    needed: Counter[str] = Counter()
    for rank in cluster.ranks():
        needed[cluster.instance(rank.instance).args.device] += rank.host == host
    clashes, drivers = [], {}
    for device, num_ranks in needed.items():
        if not num_ranks:
            continue
        command = [sys.executable, "-m", "launch.devices", device]
        found = msgspec.json.decode(subprocess.run(command, capture_output=True, check=True).stdout)
        drivers |= {f"driver of {device}": found["driver"]} if found["driver"] else {}
        for line in found["names"] or ():
            print(f"  device: {line}")
        if found["error"]:
            clashes.append(f"devices {device!r} cannot be listed: {found['error']}")
        elif found["names"] is not None and len(found["names"]) < num_ranks:
            clashes.append(f"{num_ranks} ranks need a device {device!r} each, there are {len(found['names'])}")
        if found["names"] is not None:
            clashes += shared_memory_clashes(Path("/dev/shm"))
    return clashes, drivers


def transfer_clashes(cluster: Cluster, host: str) -> list[str]:
    """What ranks on this host lack to move pages between instances."""
    needed_by = {rank.instance for rank in cluster.ranks() if rank.host == host and rank.role != "unified"}
    if not needed_by or find_spec("nixl"):
        return []
    return [f"library nixl is not installed, {', '.join(sorted(needed_by))} need it to hand pages over: pip install 'deepserve[pd]'"]


def shared_memory_clashes(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []  # not a system that has it
    size = os.statvfs(folder)
    num_bytes = size.f_frsize * size.f_blocks
    if num_bytes >= MIN_SHARED_BYTES:
        return []
    return [f"shared memory at {folder} has {num_bytes >> 20} MiB, collectives of devices need {MIN_SHARED_BYTES >> 20}"]


def _of_cluster(cluster: Cluster, report: Report, wait_s: float) -> list[str]:
    """Clashes of all hosts; of this one if the others cannot be asked."""
    if len(cluster.hosts) == 1:
        return _examine(cluster, report).clashes
    secret = cluster.secret()
    address = collector_address(cluster)
    collector = None
    try:
        if report.host == cluster.hosts[0]:
            collector = Collector(cluster.hosts, address, secret=secret, wait_s=wait_s)
            collector.start()
        with Member(report.host, address, secret=secret) as member:
            unreached = member.call(wait_s)
            if unreached is not None:
                report.clashes += unreached
                found = member.settle(_examine(cluster, report))
                if found is not None:
                    if collector is not None:
                        collector.join()  # the others have yet to be told
                    return found
    except OSError as error:
        return [*report.clashes, str(error)]
    return [*report.clashes, f"{cluster.hosts[0]} does not answer on port {cluster.frontend.control_port}; is preflight running there too?"]


def _examine(cluster: Cluster, report: Report) -> Report:
    """Adds what this host finds out about itself."""
    report.clashes += port_clashes(cluster, report.host)
    clashes, drivers = device_clashes(cluster, report.host)
    report.clashes += clashes + transfer_clashes(cluster, report.host)
    report.versions |= drivers
    try:
        folder = resolve_model(cluster.model, cluster.instances[0].args.revision)
    except ValueError as error:
        report.clashes.append(str(error))
        return report
    print(f"model in {folder}")
    report.clashes += model_clashes(folder)
    if len(cluster.hosts) > 1:
        report.files = file_hashes(folder)
    return report
