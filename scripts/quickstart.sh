#!/usr/bin/env bash
# Tree GRPO from nothing on two CPU cores: environment, warm start, reinforcement learning, report.
# Use: bash scripts/quickstart.sh. Run again: the environment is reused, outputs are overwritten.
set -euo pipefail

# ---- user-adjustable ----
SEED=${SEED:-0}
DEMONSTRATIONS=${DEMONSTRATIONS:-1500}  # sessions shown to the warm start
SFT_STEPS=${SFT_STEPS:-420}             # optimizer steps of the warm start
STEPS=${STEPS:-25}                      # GRPO steps, at least 10
OUTPUT=${OUTPUT:-outputs/quickstart}
THREADS=${THREADS:-2}                   # CPU threads of the training process
LIMIT_SECONDS=${LIMIT_SECONDS:-1200}    # a phase that takes longer has failed
# -------------------------

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh

export PYTHONPATH="$PWD/recipes"        # the task's code, for this process and for Ray's
export OMP_NUM_THREADS="$THREADS" OMP_WAIT_POLICY=passive
export TORCH_COMPILE_DISABLE=1 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

exec python -m quickstart.run --output "$OUTPUT" --seed "$SEED" --demonstrations "$DEMONSTRATIONS" \
    --sft-steps "$SFT_STEPS" --steps "$STEPS" --limit-seconds "$LIMIT_SECONDS"
