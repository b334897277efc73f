"""The frontend of a cluster: `python -m launch.frontend --cluster cluster.toml`. Ranks of every instance connect to it."""

import argparse
import socket
import sys
from pathlib import Path

from deepserve.model.hub import resolve_model
from deepserve.server.lifecycle import run_server
from deepserve.server.state import ServerOptions
from launch.cluster import Cluster, load, read_text

QUIET_S = 3.0  # three missed beats; then an instance gets no requests


def server_options(cluster: Cluster, control_listen: str | None = None) -> ServerOptions:
    """`control_listen`: address for ranks, where the host of the file is not one of this machine. Raises ValueError."""
    spec = cluster.frontend
    template = None if spec.chat_template is None else str(cluster.path.parent / spec.chat_template)
    return ServerOptions(
        model_path=str(resolve_model(cluster.model, cluster.instances[0].args.revision, with_weights=False)),
        served_model_name=tuple(spec.served_model_name or [cluster.model]),
        host=spec.listen,
        port=spec.port,
        num_engines=cluster.num_engines,
        control_address=f"tcp://{control_listen or _ip_of(spec.host)}:{spec.control_port}",
        secret=cluster.secret(),
        engine_silence_limit_s=cluster.lease_s,
        engine_quiet_limit_s=min(QUIET_S, cluster.lease_s),
        hand_off=cluster.hand_off,
        api_key=_keys(cluster, "api_key_file"),
        admin_api_key=_keys(cluster, "admin_api_key_file"),
        chat_template=template,
        generation_config=spec.generation_config,
        max_concurrent_requests=spec.max_concurrent_requests,
        max_body_bytes=spec.max_body_bytes,
        shutdown_timeout_s=spec.shutdown_timeout_s,
        access_log=spec.access_log,
    )


def _keys(cluster: Cluster, name: str) -> tuple[str, ...]:
    """Those of a file that `[frontend]` may name. Raises ValueError."""
    file = getattr(cluster.frontend, name)
    keys = () if file is None else tuple(read_text(cluster.path.parent / file, name).split())
    if file is not None and not keys:
        raise ValueError(f"{name} {file} holds no key")
    return keys


def _ip_of(host: str) -> str:
    """ZMQ listens on numeric addresses only. Raises ValueError."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ValueError(f"frontend: host {host!r} has no address: {error}") from None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.frontend", description="Frontend of a cluster.")
    parser.add_argument("--cluster", type=Path, required=True, help="cluster file")
    parser.add_argument("--hosts", type=lambda text: text.split(","), help="replaces the file's hosts")
    parser.add_argument("--control-listen", metavar="IP", help="listen there for ranks instead of at the frontend's host")
    flags = parser.parse_args(argv)
    try:
        cluster = load(flags.cluster, flags.hosts)
        options = server_options(cluster, flags.control_listen)
    except ValueError as error:
        print(f"deepserve: {error}", file=sys.stderr)
        return 1
    return run_server(options, None)


if __name__ == "__main__":
    sys.exit(main())
