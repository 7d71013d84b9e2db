#!/usr/bin/env bash
# Checks every node of a running Ray cluster, then runs a recipe, or verl itself, on N of them.
# Use, on the head: bash scripts/cluster/launch.sh N -- bash recipes/grpo/run_qwen3_fsdp2.sh [overrides]
#                or bash scripts/cluster/launch.sh N -- python -m tree_rl.train ARGUMENTS
set -euo pipefail

# ---- user-adjustable ----
RAY_ADDRESS=${RAY_ADDRESS:-auto}     # the head's HOST:PORT; auto: the cluster of this machine
WAIT_SECONDS=${WAIT_SECONDS:-300}    # for N nodes to be alive
# -------------------------

# shellcheck source=scripts/cluster/node.sh
source "$(dirname "${BASH_SOURCE[0]}")/node.sh"
cluster_read_command "$@"
cluster_find_python
cluster_use_token
export RAY_ADDRESS
# Processes on nodes that run already get the environment of the node, not of this shell: send along what matters.
export RAY_RUNTIME_ENV_HOOK=tree_rl.verl_plugin.launch.carried_environment.carry

"$PYTHON" -c 'from tree_rl.cli import main; main()' doctor --cluster --nodes "$NNODES" --wait-seconds "$WAIT_SECONDS"

case "${cluster_command[*]}" in
*recipes/sft/* | *recipes/dpo/* | *tree_rl.sft* | *"tree_rl.train dpo"* | *verl.trainer.sft_trainer*)
    # torch.distributed.run wants a process on every node.
    cluster_command=("$PYTHON" -m tree_rl.verl_plugin.launch.on_every_node "$NNODES" -- "${cluster_command[@]}")
    ;;
*recipes/*/run*.sh* | *tree_rl.train* | *verl.trainer.main_ppo*)
    # Last, so that they win. A cluster that runs counts its own processors: verl may not count them again.
    cluster_command+=(trainer.nnodes="$NNODES" ++ray_kwargs.ray_init.num_cpus=null ++ray_kwargs.ray_init.num_gpus=null)
    ;;
esac
printf 'command    NNODES=%s %s\n\n' "$NNODES" "${cluster_command[*]}"
exec "${cluster_command[@]}"
