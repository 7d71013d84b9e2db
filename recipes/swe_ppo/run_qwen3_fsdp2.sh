#!/usr/bin/env bash
# PPO with a critic on software tasks: the script of recipes/swe_grpo with this folder's config.
set -euo pipefail
RECIPE=swe_ppo exec bash "$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/swe_grpo/run_qwen3_fsdp2.sh" "$@"
