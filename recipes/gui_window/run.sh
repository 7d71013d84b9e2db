#!/usr/bin/env bash
# A tiny Qwen2.5-VL learns to click a button on screenshots, on two CPU cores; see README.md. Further arguments are
# overrides of verl's config.
set -euo pipefail

# ---- user-adjustable ----
OUTPUT=${OUTPUT:-outputs/gui_window}
STEPS=${STEPS:-24}                         # GRPO steps
SHOWN=${SHOWN:-50}                         # supervised steps before
SEED=${SEED:-0}                            # of weights, tasks and draws
PYTHON=${PYTHON:-python3}
# -------------------------

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH=$(dirname "$HERE")${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_COMPILE_DISABLE=1
mkdir -p "$OUTPUT"
OUTPUT=$(realpath "$OUTPUT")
"$PYTHON" -m gui_window.model "$OUTPUT" --seed "$SEED" --shown "$SHOWN"
"$PYTHON" -m tree_rl.train --config-path "$HERE" --config-name gui_window \
    data.train_files="$OUTPUT/tasks.parquet" data.val_files="$OUTPUT/tasks.parquet" data.seed="$SEED" \
    actor_rollout_ref.model.path="$OUTPUT/model" +actor_rollout_ref.rollout.custom.gateway_agent.seed="$SEED" \
    trainer.default_local_dir="$OUTPUT/checkpoints" trainer.total_training_steps="$STEPS" "$@"
