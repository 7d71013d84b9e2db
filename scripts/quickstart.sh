#!/usr/bin/env bash
# Tree GRPO from nothing on two CPU cores: environment, warm start, reinforcement learning, report.
# Use: bash scripts/quickstart.sh [--full] [--help]. Run again: the environment is reused, outputs are overwritten.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh

export PYTHONPATH="$PWD/recipes"        # the task's code, for this process and for Ray's
export OMP_NUM_THREADS="${THREADS:-2}" OMP_WAIT_POLICY=passive
export TORCH_COMPILE_DISABLE=1 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

exec python -m quickstart.run "$@"
