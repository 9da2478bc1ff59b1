#!/usr/bin/env bash
# Rewrite a data set with the target, in 16 shards, on as many machines as are free:
#
#   sbatch deploy/slurm/regenerate.sh
#
# Each task of the array is an independent process. It writes one shard into a folder that all machines can reach. An interrupted
# task continues its shard. After a failure submit the whole array again, not a part of it: the number of tasks is the number of
# shards, and a complete shard is not written again.

#SBATCH --job-name=specjax-regenerate
#SBATCH --array=0-15
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=regenerate-%a.log

set -euo pipefail

# shellcheck disable=SC1091  # it is made on the cluster: python3 -m venv .venv && .venv/bin/pip install . -U "jax[cuda13]"
source .venv/bin/activate

specjax regenerate --shard auto \
  --target Qwen/Qwen3-8B --drafter RedHatAI/Qwen3-8B-speculator.eagle3 \
  --source hf:HuggingFaceH4/ultrachat_200k:train_sft --output chats \
  --chat-template configs/templates/qwen3.jinja --max-new-tokens 2048
