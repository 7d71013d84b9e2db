#!/usr/bin/env bash
# The tests that generate with SGLang itself, on a CPU. It has an environment of its own, .venv-sglang (3 GB): SGLang needs
# packages that nothing else here does, and a stand-in for its CUDA kernels. Not part of scripts/test.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
TREE_RL_VENV="$PWD/.venv-sglang"
tree_rl_size="3 GB"
# --no-deps: SGLang asks for CUDA's packages, which torch's CPU build does without.
# Editable: else pip leaves a copy of its modules beside them, and names of test modules are unique here.
tree_rl_second_install=(--no-deps -r "$PWD/tests/sglang_rollout/requirements.txt" -e "$PWD/tests/sglang_rollout/distribution")
source scripts/environment.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
exec python -m pytest -m sglang tests/sglang_rollout -v "$@"
