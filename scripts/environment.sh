# Activates ./.venv in the shell that reads this, bash or zsh, and creates it first where it is missing.
# Use: source scripts/environment.sh. Set PYTHON to choose an interpreter, TREE_RL_CONSTRAINTS for another constraints file,
# TREE_RL_VENV for another folder. A script that sources this may set tree_rl_second_install (arguments of pip) and
# tree_rl_size. Everything that can fail runs in a process of its own: no option of this shell changes, and a failure
# returns 1 instead of closing it.
# shellcheck shell=bash

tree_rl_activate() {
    local root="$1" venv
    venv="${TREE_RL_VENV:-$root/.venv}"
    TREE_RL_VENV="$venv" TREE_RL_CONSTRAINTS="${TREE_RL_CONSTRAINTS:-}" TREE_RL_SIZE="${tree_rl_size:-}" \
        bash "$root/scripts/create_environment.sh" ${tree_rl_second_install[@]+"${tree_rl_second_install[@]}"} || return 1
    # shellcheck disable=SC1091
    source "$venv/bin/activate" || return 1
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONSAFEPATH=1        # keeps the folder kernels/ from posing as the package of that name
    # shellcheck source=scripts/ray_token.sh
    source "$root/scripts/ray_token.sh" || return 1
    ray_token_use || return 1
    export TOKENIZERS_PARALLELISM=false
    if ! nvidia-smi -L >/dev/null 2>&1; then
        export VERL_PLATFORM=cpu   # a CUDA build of torch makes verl expect GPUs elsewhere in the cluster
    fi
}

# bash names the file that it reads in BASH_SOURCE, zsh in an expansion that bash parses and never reaches.
if [ -n "${ZSH_VERSION:-}" ]; then
    # shellcheck disable=SC2296
    tree_rl_activate "$(cd "$(dirname "${(%):-%x}")/.." >/dev/null && pwd)"
else
    tree_rl_activate "$(cd "$(dirname "${BASH_SOURCE[0]}")/.." >/dev/null && pwd)"
fi
