#!/usr/bin/env bash
# Tree GRPO through verl's own main_ppo. Without arguments it runs a tiny model on a CPU; see README.md.
set -euo pipefail

# ---- user-adjustable, besides what recipes/launcher.sh lists ----
TRAIN_FILE=${TRAIN_FILE:-}                 # empty: the toy task of recipes/toy_task.py
REWARD_FILE=${REWARD_FILE:-}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-16}   # prompts per step
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-8}      # prompts per optimizer step
PROMPT_LENGTH=${PROMPT_LENGTH:-256}
RESPONSE_LENGTH=${RESPONSE_LENGTH:-16}
LR=${LR:-5e-3}                             # for the tiny model; 1e-6 for a pretrained one
STEPS=${STEPS:-30}
OUTPUT=${OUTPUT:-outputs/grpo}
# -----------------------------------------------------------------

# shellcheck source=recipes/launcher.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launcher.sh"
need_model tiny_model.py
need_toy_data train.parquet
run_main_ppo grpo tree_grpo "$@"
