#!/usr/bin/env bash
# Attacks software sessions as a hostile policy would: races, a storm of sessions, and every reward hack in every
# combination of agent, user and task. About an hour on two cores.
# Use: bash scripts/attacks.sh, as root for all of it; STEP=10 plays every tenth session of the product.
set -uo pipefail

# ---- user-adjustable ----
STEP=${STEP:-1}              # of the product
TIMEOUT_RACES=${TIMEOUT_RACES:-50}
WRITE_RACES=${WRITE_RACES:-200}
SESSIONS=${SESSIONS:-64}     # of each kind in the storm, hostile and honest
# -------------------------

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh || exit 1
export TMPDIR="${TMPDIR:-/tmp}" OMP_NUM_THREADS=1
export PYTHONPATH="$PWD/tests/attacks:$PWD/tests/rollout${PYTHONPATH:+:$PYTHONPATH}"

echo "date: $(date -u +%Y-%m-%d), commit: $(git describe --always --dirty --exclude '*'), cores: $(nproc)"
failed=0
attack() {
    printf '\n== %s\n' "$1"
    shift
    python "$@" || failed=1
}
attack "races, root and not root" tests/attacks/attack_cases.py races.py "$TIMEOUT_RACES" "$WRITE_RACES"
attack "storm, root and not root" tests/attacks/attack_cases.py storm.py "$SESSIONS" "$SESSIONS"
attack "reward hacks" tests/attacks/attack_cases.py product "$STEP"
exit "$failed"
