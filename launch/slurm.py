"""`launch slurm`: an sbatch script that starts `launch up` on every machine of the allocation. Pure.

Slurm picks the machines; they stand in for the cluster file's hosts in the order in which it lists them.
"""

import re
import shlex

from launch.cluster import Cluster

_OPTION = re.compile(r"[a-z][-a-z]*(=\S.*)?")
_SET_HERE = ("nodes", "ntasks-per-node")


def sbatch_script(cluster: Cluster, options: list[str]) -> str:
    """`options`: further ones of sbatch, as "partition=gpu" or "exclusive". Raises ValueError."""
    for option in options:
        if not _OPTION.fullmatch(option) or "\n" in option:
            raise ValueError(f"--set {option!r} is no option of sbatch: write NAME or NAME=VALUE")
        if option.split("=")[0] in _SET_HERE:
            raise ValueError(f"--set {option} follows from the cluster file")
    head = [f"job-name={cluster.name}", f"nodes={len(cluster.hosts)}", "ntasks-per-node=1", *options]
    file = shlex.quote(str(cluster.path))
    task = f'exec python -m launch "$0" {file} --hosts "$1" --host "$SLURMD_NODENAME"'
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{option}" for option in head),
            "set -euo pipefail",
            'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)',
            "# One task a machine. The first that fails ends the job.",
            f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(task)} preflight \"$hosts\"",
            f"exec srun --kill-on-bad-exit=1 bash -c {shlex.quote(task)} up \"$hosts\"",
            "",
        ]
    )  # fmt: skip
