#!/usr/bin/env bash
# Everything that must hold before a change lands: style, types, import contracts, tests.
# Use: bash scripts/test.sh [--fast | --slow] [arguments of pytest]
#   --fast  the method alone: trees, models, training, kernels against their references, one file of verl's engine
#   --slow  what the full run leaves out: whole recipes under Ray, installations, large searches; no style or types
# Two processes share the test files, one thread each; WORKERS=0 runs them in this one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

tier=full tests=()
case "${1:-}" in
    --fast)
        tier=fast
        tests=(tests/tree tests/cost tests/models tests/training tests/verl_plugin/test_engine_equals_rows_alone.py)
        for law in tree_attention_is_row_attention recurrences_are_those_of_rows tree_conv edge_log_probs tree_layout; do
            tests+=("kernels/tests/test_$law.py")
        done
        shift
        ;;
    --slow)
        tier=slow
        tests=(-m slow)
        shift
        ;;
esac

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

if [ "$tier" != slow ]; then
    run_step "style" ruff check .
    run_step "format" ruff format --check .
    run_step "types" mypy
    run_step "import contracts" lint-imports
fi
run_step "tests" python -m pytest -n "${WORKERS:-2}" --dist loadgroup --no-loadscope-reorder --durations=15 \
    ${tests[@]+"${tests[@]}"} "$@"

printf '\n'
if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[*]}"
    exit 1
fi
echo "All steps passed in $SECONDS s."
