#!/bin/bash
# Two hosts of 8 GPUs:  sbatch deploy/slurm.sh --data bytes --layout dp=4,tp=4 --save /shared/runs/7
# Run it in the folder that holds deploy/, which all hosts must see, with minidist installed. A job that is
# requeued or submitted again continues from the newest checkpoint.
#SBATCH --job-name=minidist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1      # torchrun, which starts the ranks
#SBATCH --gpus-per-node=8        # without GPUs, remove this line and set RANKS_PER_HOST
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120        # two minutes before the time is over, the ranks save
#SBATCH --requeue                # back into the queue if a host fails
#SBATCH --output=%x-%j.out
set -euo pipefail

# A fresh store at each restart of the ranks.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Seconds from SIGTERM until torchrun kills ranks that are still saving; the default is 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110
first=$(scontrol show hostnames "${SLURM_JOB_NODELIST:?start this with sbatch}" | sed -n 1p)
ranks=${RANKS_PER_HOST:-${SLURM_GPUS_ON_NODE:-1}}

# A step gets only the cores that it asks for: since version 22.05, srun does not take them from #SBATCH.
srun --cpus-per-task "$SLURM_CPUS_PER_TASK" \
    torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks" --max-restarts 20 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:29500" \
    deploy/train.py "$@"
