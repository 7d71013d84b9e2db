#!/usr/bin/env bash
# Creates ./.venv from pyproject.toml and constraints/cpu.txt, once, and activates it.
# Use: source scripts/environment.sh. Set PYTHON to choose an interpreter, TREE_RL_CONSTRAINTS for another constraints file,
# TREE_RL_VENV for another folder. A script that sources this may set tree_rl_second_install (arguments of pip) and its size.
set -euo pipefail

tree_rl_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
tree_rl_constraints="${TREE_RL_CONSTRAINTS:-$tree_rl_root/constraints/cpu.txt}"
tree_rl_venv="${TREE_RL_VENV:-$tree_rl_root/.venv}"
tree_rl_size="${tree_rl_size:-2 GB}"

tree_rl_pick_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3 python; do
        # pip and venv are separate packages on some systems: ask for both.
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
            >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    echo "tree_rl needs Python 3.11 or 3.12 with the venv module; none found. Install one or set PYTHON=/path/to/python." >&2
    return 1
}

tree_rl_install() {
    local log="$tree_rl_venv/install.log" total seconds=$SECONDS
    total="$(grep -c '==' "$tree_rl_constraints")"
    echo "[environment] installing about $total packages ($tree_rl_size); log: ${log#"$tree_rl_root"/}"
    : >"$log"
    tree_rl_pip "$log" "$total" -c "$tree_rl_constraints" -e "$tree_rl_root[cpu,agents,dev]"
    if [ -n "${tree_rl_second_install+x}" ]; then
        tree_rl_pip "$log" "$total" "${tree_rl_second_install[@]}"
    fi
    echo "[environment] ready after $((SECONDS - seconds)) s"
}

tree_rl_pip() {
    local log="$1" total="$2"
    shift 2
    # Byte-compiled on installation: `import verl` costs 8 seconds a process then, and 25 otherwise.
    if ! "$tree_rl_venv/bin/python" -m pip install --compile --disable-pip-version-check "$@" 2>&1 |
        tee -a "$log" | awk -v total="$total" '
            /^(Collecting|Processing|Requirement already) / { n++; if (n % 15 == 0) { print "[environment]   found " n " of about " total; fflush() } }
            /^Installing collected/ { print "[environment]   unpacking and byte-compiling, about a minute"; fflush() }'; then
        tail -n 25 "$log" >&2
        echo "[environment] the installation failed; the lines above are the end of $log" >&2
        return 1
    fi
}

tree_rl_prepare() {
    local python stamp
    stamp="$(cat "$tree_rl_root/pyproject.toml" "$tree_rl_constraints" | cksum) $tree_rl_root"
    if [ -x "$tree_rl_venv/bin/python" ] && [ "$(cat "$tree_rl_venv/tree_rl.stamp" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    if [ ! -x "$tree_rl_venv/bin/python" ]; then
        python="$(tree_rl_pick_python)"
        echo "[environment] creating ${tree_rl_venv#"$tree_rl_root"/} with $("$python" --version)"
        "$python" -m venv "$tree_rl_venv"
    fi
    tree_rl_install
    echo "$stamp" >"$tree_rl_venv/tree_rl.stamp"
}

tree_rl_prepare
# shellcheck disable=SC1091
source "$tree_rl_venv/bin/activate"
unset PYTHONDONTWRITEBYTECODE
export PYTHONSAFEPATH=1        # keeps the folder kernels/ from posing as the package of that name
# shellcheck source=scripts/ray_token.sh
source "$tree_rl_root/scripts/ray_token.sh"
ray_token_use
export TOKENIZERS_PARALLELISM=false
if ! nvidia-smi -L >/dev/null 2>&1; then
    export VERL_PLATFORM=cpu   # a CUDA build of torch makes verl expect GPUs elsewhere in the cluster
fi
