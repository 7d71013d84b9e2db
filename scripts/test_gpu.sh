#!/usr/bin/env bash
# Runs the tests marked gpu on this machine's GPUs, each file in a process of its own, and writes one log.
# Use: bash scripts/test_gpu.sh [--jobs N] [LOG [FILE ...]], in the documented GPU environment; LOG is
# docs/benchmarks/gpu_tests.log by default, N files run at a time (1), FILEs are all that hold such tests.
# Set PYTHON to choose an interpreter, COMMIT outside a git checkout.
set -euo pipefail

gpu_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
gpu_python="${PYTHON:-python}"
export PYTHONSAFEPATH=1       # keeps the folder kernels/ from posing as the package of that name
# shellcheck source=scripts/ray_token.sh
source "$gpu_root/scripts/ray_token.sh"
ray_token_use
export TOKENIZERS_PARALLELISM=false

gpu_require_device() {
    if ! "$gpu_python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        echo "test_gpu.sh needs a CUDA device that torch sees, found none. Install the GPU environment" \
            '(pip install -c constraints/gpu.txt -e ".[gpu,agents,dev]") on a machine with a GPU, or set PYTHON.' >&2
        return 2
    fi
}

# What ran: commit, GPUs, versions.
gpu_describe() {
    echo "date: $(date -u +%Y-%m-%d)"
    echo "commit: ${COMMIT:-$(git -C "$gpu_root" describe --always --dirty --exclude '*')}"
    "$gpu_python" - <<'PYTHON'
import importlib.metadata
import platform

import torch

names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
print("GPUs:", ", ".join(names) or "none")
print("CUDA of torch:", torch.version.cuda)
print("python:", platform.python_version())
packages = ("torch", "triton", "transformers", "verl", "flash-attn", "flash-attn-4", "flash-linear-attention")
for package in (*packages, "liger-kernel"):
    try:
        print(f"{package}:", importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        print(f"{package}: absent")
PYTHON
}

# Files that hold tests with the marker $1 among the paths that follow; all test paths by default.
gpu_files() {
    local marker="$1" found
    shift
    found="$("$gpu_python" -m pytest --collect-only -q -p no:cacheprovider -m "$marker" "$@")" ||
        { printf '%s\n' "$found" >&2; return 1; }
    printf '%s\n' "$found" | sed -n 's/^\([^ ]*\.py\)::.*/\1/p' | sort -u
}

# Runs the tests of one file that carry the marker, and appends its section to the log in one piece, also where files
# run side by side.
gpu_run_file() {
    local marker="$1" log="$2" file="$3" output status=0 seconds=$SECONDS
    output="$(mktemp)"
    # A process per file returns its memory on the GPU, whatever happens in it.
    "$gpu_python" -m pytest -q -rfE -p no:cacheprovider -m "$marker" "$file" >"$output" 2>&1 || status=$?
    {
        printf '\n== %s\n' "$file"
        [ "$status" -eq 0 ] || cat "$output" >&2
        grep -E '^(FAILED|ERROR)' "$output" || true
        tail -n 1 "$output"
        echo "$((SECONDS - seconds)) s with imports"
    } >"$output.section"
    tee -a "$log" <"$output.section"
    rm -f "$output" "$output.section"
    return "$status"
}

# Runs `gpu_run_file` for each file, GPU_JOBS at a time; returns 1 if any failed.
gpu_run_files() {
    local marker="$1" log="$2" failed=0 running=0 file
    shift 2
    for file in "$@"; do
        if [ "$running" -ge "${GPU_JOBS:-1}" ]; then
            wait -n || failed=$((failed + 1))
            running=$((running - 1))
        fi
        gpu_run_file "$marker" "$log" "$file" &
        running=$((running + 1))
    done
    while [ "$running" -gt 0 ]; do
        wait -n || failed=$((failed + 1))
        running=$((running - 1))
    done
    printf '\n%d files, %d failed\n' "$#" "$failed" | tee -a "$log"
    return $((failed > 0))
}

gpu_main() {
    local log files
    cd "$gpu_root"
    if [ "${1:-}" = --jobs ]; then
        GPU_JOBS="${2:?test_gpu.sh: --jobs expects a number of files that run at a time}"
        shift 2
    fi
    log="${1:-docs/benchmarks/gpu_tests.log}"
    gpu_require_device
    mapfile -t files < <(gpu_files gpu "${@:2}")
    if [ ${#files[@]} -eq 0 ]; then
        echo "test_gpu.sh found no test marked gpu; the lines above say why" >&2
        return 1
    fi
    mkdir -p "$(dirname "$log")"
    gpu_describe | tee "$log"
    gpu_run_files gpu "$log" "${files[@]}"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    gpu_main "$@"
fi
