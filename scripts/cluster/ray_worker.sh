#!/usr/bin/env bash
# Joins this node to a Ray cluster and stays: Ctrl-C, or SIGTERM, stops what it started and nothing else.
# Use: bash scripts/cluster/ray_worker.sh HEAD:PORT [options of `ray start`, such as --num-gpus 8]
set -euo pipefail

# ---- user-adjustable ----
NODE_IP=${NODE_IP:-}                 # address by which other nodes reach this one; empty: from INTERFACE
INTERFACE=${INTERFACE:-}             # network between nodes, such as eth0; empty: Ray, NCCL and gloo choose
WAIT_SECONDS=${WAIT_SECONDS:-300}    # for the head to appear
# RAY_AUTH_TOKEN_PATH                # the head's token; default ~/.ray/auth_token
# -------------------------

# shellcheck source=scripts/cluster/node.sh
source "$(dirname "${BASH_SOURCE[0]}")/node.sh"
head=${1:-}
[[ $head =~ ^[^:[:space:]]+:[0-9]+$ ]] || cluster_refuse "expected the head's HOST:PORT first, received '${head:-nothing}'; ray_head.sh prints it"
shift
cluster_find_python
cluster_use_token
NODE_IP=$(cluster_node_ip)
cluster_use_interface

SECONDS=0
until (exec 3<>"/dev/tcp/${head%:*}/${head##*:}") 2>/dev/null; do
    ((SECONDS < WAIT_SECONDS)) || cluster_refuse "no answer from the head at $head after $WAIT_SECONDS s; is ray_head.sh running there, and is port ${head##*:} open between the nodes?"
    sleep 1
done

echo "worker     $NODE_IP of the head $head; this script stays, Ctrl-C stops this node"
echo "token      $cluster_token"
echo "logs       in session_latest/logs of the head's RAY_TEMP_DIR, on this node"
exec ray start --address="$head" --block --disable-usage-stats --node-ip-address="$NODE_IP" "$@"
