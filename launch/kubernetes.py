"""`launch k8s`: manifests of a cluster: the frontend as a Deployment with a Service, each instance as a LeaderWorkerSet. Pure.

A LeaderWorkerSet (leaderworkerset.x-k8s.io) starts the nodes of an instance as one group of pods and starts all of them again when one
fails, which is what an instance needs. The secret and the API keys are read from a Secret that is not written here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launch.cluster import Cluster, Instance, is_loopback, read_text
from launch.commands import TORCHRUN_STOP_S

FOLDER = "/etc/deepserve"  # of the cluster file in every pod
MARGIN_S = 5.0
Manifest = dict[str, Any]


@dataclass(frozen=True)
class PodOptions:
    """What a cluster file does not say about pods."""

    image: str
    device_resource: str | None = None  # name of the extended resource that one rank takes one of
    model_claim: str | None = None  # PersistentVolumeClaim with the model's folder
    shared_memory: str = "16Gi"


def manifests(cluster: Cluster, options: PodOptions) -> str:
    """YAML documents for `kubectl apply -f -`. Raises ValueError for files that cannot run in pods."""
    _check(cluster, options)
    documents = [_config_map(cluster), _deployment(cluster, options), _service(cluster)]
    documents += [_leader_worker_set(cluster, instance, options) for instance in cluster.instances]
    names = " ".join(f"--from-file={name}" for name in _secret_files(cluster))
    head = f"# First: kubectl create secret generic {cluster.name}-secret {names}\n"
    return head + yaml.safe_dump_all(documents, sort_keys=False, width=1000)


def _check(cluster: Cluster, options: PodOptions) -> None:
    if cluster.secret_file is None:
        raise ValueError(f"{cluster.path}: pods are on a network, so their control sockets need a secret_file")
    for what, name in _files(cluster):
        if Path(name).name != name:
            raise ValueError(f"{cluster.path}: {what} {name!r} must lie beside the cluster file to get into pods")
    if is_loopback(cluster.frontend.listen):
        raise ValueError(f"{cluster.path}: frontend: a Service does not reach listen {cluster.frontend.listen!r}; 0.0.0.0 can be reached")
    if not cluster.frontend.port:
        raise ValueError(f"{cluster.path}: frontend: port must be given")
    if options.model_claim is not None and not cluster.model.startswith("/"):
        raise ValueError(f"{cluster.path}: model {cluster.model!r} is no absolute path at which a volume could be mounted")


def _files(cluster: Cluster) -> list[tuple[str, str]]:
    """Files that the cluster file names, and what they are there."""
    spec, secret_file = cluster.frontend, cluster.secret_file
    secret_name = secret_file.name if secret_file.parent == cluster.path.parent else str(secret_file)
    found = [("secret_file", secret_name), ("api_key_file", spec.api_key_file), ("chat_template", spec.chat_template)]
    return [(what, name) for what, name in found if name]


def _secret_files(cluster: Cluster) -> list[str]:
    return [name for what, name in _files(cluster) if what != "chat_template"]


def _metadata(name: str) -> Manifest:
    return {"name": name, "labels": {"app.kubernetes.io/name": name}}


def _config_map(cluster: Cluster) -> Manifest:
    template = cluster.frontend.chat_template
    data = {"cluster.toml": read_text(cluster.path, "cluster file")}
    if template:
        data[template] = read_text(cluster.path.parent / template, "chat_template")
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(f"{cluster.name}-cluster"), "data": data}


def _deployment(cluster: Cluster, options: PodOptions) -> Manifest:
    name = _frontend_name(cluster)
    labels = {"app.kubernetes.io/name": name}
    spec = cluster.frontend
    container = {
        "name": "frontend",
        "image": options.image,
        "command": ["python", "-m", "launch.frontend", "--cluster", f"{FOLDER}/cluster.toml", "--control-listen", "0.0.0.0"],
        "ports": [{"name": "http", "containerPort": spec.port}, {"name": "control", "containerPort": spec.control_port}],
        # Not /ready: while one instance starts again, the others serve.
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 2},
        "livenessProbe": {"tcpSocket": {"port": "http"}, "initialDelaySeconds": 60},
        **_mounts(cluster, options),
    }
    grace_s = TORCHRUN_STOP_S if spec.shutdown_timeout_s is None else spec.shutdown_timeout_s
    pod = {"containers": [container], "terminationGracePeriodSeconds": int(grace_s + MARGIN_S), "volumes": _volumes(cluster, options)}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(name),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},  # ranks know one frontend
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _service(cluster: Cluster) -> Manifest:
    name, spec = _frontend_name(cluster), cluster.frontend
    ports = [{"name": "http", "port": spec.port, "targetPort": "http"}]
    ports.append({"name": "control", "port": spec.control_port, "targetPort": "control"})
    # Ranks must reach a frontend that is not ready: it is not before they have come.
    service = {"selector": {"app.kubernetes.io/name": name}, "ports": ports, "publishNotReadyAddresses": True}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(name), "spec": service}


def _leader_worker_set(cluster: Cluster, instance: Instance, options: PodOptions) -> Manifest:
    name = f"{cluster.name}-{instance.name}"
    container: Manifest = {
        "name": "ranks",
        "image": options.image,
        "command": ["sh", "-c", _torchrun_line(cluster, instance)],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": f"{cluster.supervision.stop_timeout_s:.0f}"},
            *({"name": key, "value": value} for key, value in instance.env.items()),
        ],
        **_mounts(cluster, options),
    }
    if options.device_resource is not None:
        container["resources"] = {"limits": {options.device_resource: str(instance.parallel.ranks_per_node)}}
    container["volumeMounts"] = [*container["volumeMounts"], {"name": "shm", "mountPath": "/dev/shm"}]
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}}
    pod = {
        "containers": [container],
        "terminationGracePeriodSeconds": int(cluster.supervision.stop_timeout_s + MARGIN_S),
        "volumes": [*_volumes(cluster, options), shm],
    }
    template = {"metadata": {"labels": {"app.kubernetes.io/name": name}}, "spec": pod}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": _metadata(name),
        "spec": {
            "replicas": 1,
            "leaderWorkerTemplate": {
                "size": instance.parallel.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": template,  # the leader is a worker like the others
            },
        },
    }


def _torchrun_line(cluster: Cluster, instance: Instance) -> str:
    """For the shell of a pod, which knows the group's leader and its own place in the group."""
    return (
        f"exec torchrun --nnodes {instance.parallel.nodes} --nproc-per-node {instance.workers_per_node} --rdzv-backend c10d "
        f'--rdzv-endpoint "$LWS_LEADER_ADDRESS:{instance.rdzv_port}" --rdzv-id {cluster.name}-{instance.name} '
        '--rdzv-conf "is_host=$([ "$LWS_WORKER_INDEX" = 0 ] && echo true || echo false)" --local-addr "$POD_IP" '
        f"-m launch.worker --cluster {FOLDER}/cluster.toml --instance {instance.name} "
        f"--frontend {_frontend_name(cluster)}:{cluster.frontend.control_port}"
    )


def _frontend_name(cluster: Cluster) -> str:
    return f"{cluster.name}-frontend"


def _mounts(cluster: Cluster, options: PodOptions) -> Manifest:
    mounts = [{"name": "cluster", "mountPath": FOLDER, "readOnly": True}]
    if options.model_claim is not None:
        mounts.append({"name": "model", "mountPath": cluster.model, "readOnly": True})
    return {"volumeMounts": mounts}


def _volumes(cluster: Cluster, options: PodOptions) -> list[Manifest]:
    sources: list[Manifest] = [
        {"configMap": {"name": f"{cluster.name}-cluster"}},
        {"secret": {"name": f"{cluster.name}-secret", "items": [{"key": name, "path": name} for name in _secret_files(cluster)]}},
    ]
    volumes: list[Manifest] = [{"name": "cluster", "projected": {"sources": sources}}]
    if options.model_claim is not None:
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": options.model_claim, "readOnly": True}})
    return volumes
