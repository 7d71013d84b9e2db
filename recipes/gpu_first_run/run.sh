#!/usr/bin/env bash
# Five GRPO steps on trees on one GPU, without a network; then what a healthy run shows, beside what this one showed.
set -euo pipefail

# ---- user-adjustable, besides what recipes/launcher.sh lists ----
MODEL=${MODEL:-}                           # folder of a Hugging Face model; empty: random weights, made here
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-16}   # prompts per step
RESPONSE_LENGTH=${RESPONSE_LENGTH:-64}
STEPS=${STEPS:-5}
OUTPUT=${OUTPUT:-outputs/gpu_first_run}
# -----------------------------------------------------------------

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
MODEL_PATH=$MODEL TRAIN_FILE='' PROMPT_LENGTH=256 MINI_BATCH_SIZE=$TRAIN_BATCH_SIZE LR=1e-6
SAVE_FREQ=${SAVE_FREQ:--1} TEST_FREQ=${TEST_FREQ:--1} LOGGER=${LOGGER:-file} EXPERIMENT=${EXPERIMENT:-gpu_first_run}
# shellcheck source=recipes/launcher.sh
source "$HERE/../launcher.sh"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
"$PYTHON" "$HERE/before.py" "$DEVICE" "$ROLLOUT" "$MODEL"
mkdir -p "$OUTPUT"
OUTPUT=$(realpath "$OUTPUT")
export VERL_FILE_LOGGER_PATH=$OUTPUT/metrics.jsonl
rm -f "$VERL_FILE_LOGGER_PATH"
need_model "$([[ $DEVICE == gpu ]] && echo gpu_first_run/random_model.py || echo tiny_model.py)"
need_toy_data train.parquet
run_main_ppo grpo tree_grpo actor_rollout_ref.rollout.gpu_memory_utilization=0.3 \
    actor_rollout_ref.rollout.enforce_eager=true data.dataloader_num_workers=0 "$@" 2>&1 | tee "$OUTPUT/log.txt"
"$PYTHON" "$HERE/after.py" "$OUTPUT" --device "$DEVICE" --seconds "$SECONDS" --model "$MODEL"
