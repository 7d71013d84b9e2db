#!/usr/bin/env bash
# Everything that must hold before a change lands: style, types, import contracts, tests. Arguments go to pytest.
# Two processes share the test files, one thread each; WORKERS=0 runs them in this one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

failed=()
run_step() {
    local title="$1" seconds=$SECONDS
    shift
    printf '\n== %s\n' "$title"
    if "$@"; then
        printf -- '-- %s: passed in %d s\n' "$title" $((SECONDS - seconds))
    else
        failed+=("$title")
        printf -- '-- %s: FAILED after %d s\n' "$title" $((SECONDS - seconds))
    fi
}

run_step "style" ruff check .
run_step "format" ruff format --check .
run_step "types" mypy
run_step "import contracts" lint-imports
run_step "tests" python -m pytest -n "${WORKERS:-2}" --dist loadgroup --no-loadscope-reorder --durations=15 "$@"

printf '\n'
if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[*]}"
    exit 1
fi
echo "All steps passed in $SECONDS s."
