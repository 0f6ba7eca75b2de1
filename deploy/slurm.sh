#!/bin/bash
# Two hosts of 8 GPUs:  sbatch deploy/slurm.sh --data bytes --layout dp=4,tp=4 --save /shared/runs/7
# From the folder that holds deploy/, which all hosts have to see, with minidist installed there. A job that
# comes back from the queue, or that is handed in again, goes on from the newest checkpoint.
#SBATCH --job-name=minidist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1      # torchrun, which starts the ranks
#SBATCH --gpus-per-node=8        # without GPUs take this line out, and set RANKS_PER_HOST
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120        # two minutes before the time is over, the ranks save
#SBATCH --requeue                # back into the queue where a host fails
#SBATCH --output=%x-%j.out
set -euo pipefail

# A fresh store each time that the ranks are started anew.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Seconds from SIGTERM until torchrun kills ranks that still save; without it 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110
first=$(scontrol show hostnames "${SLURM_JOB_NODELIST:?start this with sbatch}" | sed -n 1p)
ranks=${RANKS_PER_HOST:-${SLURM_GPUS_ON_NODE:-1}}

# A step has no more cores than it asks for: from version 22.05 on srun takes none over from #SBATCH.
srun --cpus-per-task "$SLURM_CPUS_PER_TASK" \
    torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks" --max-restarts 20 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:29500" \
    deploy/train.py "$@"
