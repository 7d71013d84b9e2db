#!/usr/bin/env bash
# The tests of several nodes: network namespaces with addresses of their own, Ray in each, recipes across them. Needs root.
# Use: bash scripts/test_cluster.sh [arguments of pytest]; about 20 minutes on 2 cores, 12 GB of memory.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python -m pytest -m cluster tests/cluster -p no:cacheprovider --durations=0 "$@"
