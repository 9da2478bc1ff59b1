#!/usr/bin/env bash
# Train a drafter over two hosts with eight GPUs each, in as many pieces as the time limit makes:
#
#   sbatch deploy/slurm/train.sh
#
# srun starts one process for each GPU. At a signal the training finishes its step, saves it, and ends with status 143; this script
# then puts the job back into the queue, where it continues. So does Slurm after a preemption or the loss of a node. After any other
# error the job ends: the same command would fail again. `runs` must be a folder that all hosts can reach.

#SBATCH --job-name=specjax-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=train-%j.log

# --signal: the training gets the signal five minutes before its time is over. Its log says how long a step and a save take; if they
# take longer, change it. For a preemption, the partition's GraceTime must be longer.

set -euo pipefail

# shellcheck disable=SC1091  # it is made on the cluster: python3 -m venv .venv && .venv/bin/pip install . -U "jax[cuda13]"
source .venv/bin/activate

# --kill-on-bad-exit: if one process is lost, the others cannot continue.
set +e
srun --kill-on-bad-exit=1 \
  specjax train --config configs/eagle3_qwen3_8b.yaml --mesh 16 1 --data.batch 16 \
  --output runs/eagle3_qwen3_8b --resume auto
status=$?
set -e

if [ "$status" -eq 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
