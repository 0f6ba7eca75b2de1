"""The program that every launch file here starts: `minidist train`, on the ranks that the launcher makes.

    torchrun --nproc-per-node 2 deploy/train.py --data digits                       SLURM, Kubernetes
    accelerate launch --config_file deploy/accelerate.yaml deploy/train.py --data digits
    python deploy/train.py --data digits                                            SageMaker

torchrun and Accelerate start every rank. SageMaker starts one process on each host and lists the hosts in a
file; that process becomes an `accelerate launch` with a rank for each GPU.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

SAGEMAKER = Path("/opt/ml/input/config/resourceconfig.json")
"""The file in which SageMaker tells each host of a job about the others."""


def accelerate(job: dict[str, Any], words: list[str]) -> list[str]:
    """Return the command that starts the ranks on this host of a SageMaker job, and set its environment."""
    hosts, card = sorted(job["hosts"]), job["network_interface_name"]
    gpus = len([*Path("/dev").glob("nvidia[0-9]*")])
    ranks = len(hosts) * int(os.environ.get("RANKS_PER_HOST") or max(1, gpus))
    os.environ.update({"GLOO_SOCKET_IFNAME": card, "NCCL_SOCKET_IFNAME": card})
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a fresh store at each restart of the ranks
    # SageMaker grants two minutes after SIGTERM; torchrun's default is 30 s.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "110"
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(Path(__file__).with_name("accelerate.yaml"))),
        *("--num_machines", str(len(hosts)), "--num_processes", str(ranks)),
        *("--machine_rank", str(hosts.index(job["current_host"]))),
        *("--main_process_ip", hosts[0], "--rdzv_backend", "c10d", "--max_restarts", "20"),
        *(os.path.abspath(__file__), *words),
    ]


def main(words: list[str]) -> None:
    """Train with these arguments; see `minidist train --help`."""
    if SAGEMAKER.exists() and "TORCHELASTIC_RUN_ID" not in os.environ:
        command = accelerate(json.loads(SAGEMAKER.read_text()), words)
        os.execv(command[0], command)
    from minidist.cli.commands import main as minidist

    minidist(["train", *words])


if __name__ == "__main__":
    main(sys.argv[1:])
