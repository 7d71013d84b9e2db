#!/usr/bin/env bash
# Hands launch.sh to a cluster as a Ray job: it runs on the head, survives this shell, and its output is kept there.
# Use: bash scripts/cluster/submit.sh N -- bash recipes/grpo/run_qwen3_fsdp2.sh [overrides]
# Variables of this shell do not travel; set them in the command: submit.sh 2 -- env STEPS=100 bash recipes/...
set -euo pipefail

# ---- user-adjustable ----
DASHBOARD=${DASHBOARD:-http://127.0.0.1:8265}
CLUSTER_FOLDER=${CLUSTER_FOLDER:-}   # where this repository lies on the head; empty: the same path as here
WORKING_DIR=${WORKING_DIR:-}         # a folder to upload and run in instead
WAIT_SECONDS=${WAIT_SECONDS:-300}    # for N nodes to be alive
SUBMIT_OPTIONS=${SUBMIT_OPTIONS:-}   # more options of `ray job submit`, such as --no-wait
# -------------------------

# shellcheck source=scripts/cluster/node.sh
source "$(dirname "${BASH_SOURCE[0]}")/node.sh"
cluster_read_command "$@"
cluster_find_python
cluster_use_token

folder=${CLUSTER_FOLDER:-$cluster_root}
options=()
if [[ -n $WORKING_DIR ]]; then
    [[ -f $WORKING_DIR/scripts/cluster/launch.sh ]] || cluster_refuse "expected WORKING_DIR to be this repository, found no scripts/cluster/launch.sh in '$WORKING_DIR'"
    options+=(--working-dir "$WORKING_DIR")
    folder=.
fi
read -ra more <<<"$SUBMIT_OPTIONS"
id=${SUBMISSION_ID:-tree_rl_$(date -u +%Y%m%d_%H%M%S)_$RANDOM}

echo "job        $id"
echo "dashboard  $DASHBOARD/#/jobs"
echo "logs       ray job logs --address $DASHBOARD -f $id"
echo "stop       ray job stop --address $DASHBOARD $id"
# shellcheck disable=SC2016 # "$1" is for the shell on the head
exec ray job submit --address "$DASHBOARD" --submission-id "$id" "${options[@]}" "${more[@]}" -- \
    env WAIT_SECONDS="$WAIT_SECONDS" bash -c 'cd "$1" && shift && exec bash scripts/cluster/launch.sh "$@"' launch "$folder" "$NNODES" -- "${cluster_command[@]}"
