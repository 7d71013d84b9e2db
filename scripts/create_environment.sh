#!/usr/bin/env bash
# Creates ./.venv from pyproject.toml and constraints/cpu.txt, once: with uv where it is on the PATH, else with pip.
# scripts/environment.sh runs this and activates it. Reads PYTHON, TREE_RL_CONSTRAINTS (the lock file), TREE_RL_VENV and
# TREE_RL_SIZE (for its message); arguments are those of a second installation.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
constraints="${TREE_RL_CONSTRAINTS:-$root/constraints/cpu.txt}"
venv="${TREE_RL_VENV:-$root/.venv}"
size="${TREE_RL_SIZE:-2 GB}"
second_install=("$@")

pick_python() {
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

install_packages() {
    local log="$venv/install.log" total seconds=$SECONDS
    total="$(grep -c '==' "$constraints")"
    echo "[environment] installing about $total packages ($size); log: ${log#"$root"/}"
    : >"$log"
    install_logged "$log" "$total" -c "$constraints" -e "$root[dev,docs]"
    if [ ${#second_install[@]} -gt 0 ]; then
        install_logged "$log" "$total" "${second_install[@]}"
    fi
    echo "[environment] ready after $((SECONDS - seconds)) s"
}

install_logged() {
    local log="$1" total="$2"
    shift 2
    if ! install_compiled "$@" 2>&1 |
        tee -a "$log" | awk -v total="$total" '
            /^(Resolved|Prepared|Installed|Bytecode compiled) / { print "[environment]   " $0; fflush() }
            /^(Collecting|Processing|Requirement already) / { n++; if (n % 15 == 0) { print "[environment]   found " n " of about " total; fflush() } }
            /^Installing collected/ { print "[environment]   unpacking and byte-compiling, about a minute"; fflush() }'; then
        tail -n 25 "$log" >&2
        echo "[environment] the installation failed; the lines above are the end of $log" >&2
        return 1
    fi
}

# Byte-compiled on installation: `import verl` costs 8 seconds a process then, and 25 otherwise.
install_compiled() {
    if command -v uv >/dev/null; then
        give_uv_settings_of_pip
        uv pip install --python "$venv/bin/python" --compile-bytecode "$@"
    else
        "$venv/bin/python" -m pip install --compile --disable-pip-version-check "$@"
    fi
}

# uv reads neither pip's files nor its variables. Without them it misses a mirror, or a CPU build of torch on this disk.
give_uv_settings_of_pip() {
    local settings pair variable value
    settings="$("$venv/bin/python" -m pip config list)"
    for pair in index-url:UV_DEFAULT_INDEX extra-index-url:UV_INDEX find-links:UV_FIND_LINKS cert:SSL_CERT_FILE; do
        variable="${pair#*:}"
        value="$(sed -n "s/^[a-z:]*\.${pair%:*}='\(.*\)'\$/\1/p" <<<"$settings" | head -n 1)"
        value="${value//\\n/ }"
        if [ "$variable" = UV_FIND_LINKS ]; then
            value="${value// /,}"
        fi
        if [ -n "$value" ] && [ -z "${!variable:-}" ]; then
            export "$variable=$value"
        fi
    done
    export UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}"  # as pip: the best version of all indices
}

refuse_what_ray_splits() {
    case "$venv" in
        *[[:space:]\'\"\\\$\&\;\|\<\>\(\)\*\?\[\]{}\!\#\`]*)
            echo "Ray cannot start workers from $venv: its path has spaces or quotes." >&2
            echo "Set TREE_RL_VENV to a folder whose path has none, such as \$HOME/tree_rl_venv." >&2
            return 1
            ;;
    esac
}

prepare() {
    local python stamp
    refuse_what_ray_splits
    stamp="$(cat "$root/pyproject.toml" "$constraints" | cksum) $root"
    if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/tree_rl.stamp" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    if [ ! -x "$venv/bin/python" ]; then
        python="$(pick_python)"
        echo "[environment] creating ${venv#"$root"/} with $("$python" --version)"
        "$python" -m venv "$venv"
    fi
    install_packages
    echo "$stamp" >"$venv/tree_rl.stamp"
}

prepare
