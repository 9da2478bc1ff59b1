#!/usr/bin/env bash
# Serve one target over two hosts with eight GPUs each:
#
#   sbatch deploy/slurm/serve.sh
#
# srun starts one process for each GPU, as JAX expects under Slurm, and JAX reads the process numbers from Slurm's variables. Only
# the first process listens for requests, on the first host: `squeue --me --format="%N"` prints it. The key must be in key.txt, in
# the folder that you submit the job from.

#SBATCH --job-name=specjax-serve
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --output=serve-%j.log

# --signal: the server gets the signal three minutes before its time is over, so that requests have --drain-seconds to finish.

set -euo pipefail

# shellcheck disable=SC1091  # it is made on the cluster: python3 -m venv .venv && .venv/bin/pip install . -U "jax[cuda13]"
source .venv/bin/activate

# --kill-on-bad-exit: if one process is lost, the others cannot continue.
srun --kill-on-bad-exit=1 \
  specjax serve --target deepseek-ai/DeepSeek-V3 --drafter mtp:deepseek-ai/DeepSeek-V3 --mesh 1 16 \
  --rows 16 --host 0.0.0.0 --port 8000 --api-key-file key.txt --drain-seconds 120
