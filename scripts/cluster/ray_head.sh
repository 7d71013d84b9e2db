#!/usr/bin/env bash
# Starts the head of a Ray cluster on this node and stays: Ctrl-C, or SIGTERM, stops what it started and nothing else.
# Use: bash scripts/cluster/ray_head.sh [options of `ray start`, such as --num-gpus 8]
set -euo pipefail

# ---- user-adjustable ----
NODE_IP=${NODE_IP:-}                        # address by which other nodes reach this one; empty: from INTERFACE
INTERFACE=${INTERFACE:-}                    # network between nodes, such as eth0; empty: Ray, NCCL and gloo choose
HEAD_PORT=${HEAD_PORT:-6379}
DASHBOARD_HOST=${DASHBOARD_HOST:-127.0.0.1} # 0.0.0.0 shows the dashboard to the network, behind the token
DASHBOARD_PORT=${DASHBOARD_PORT:-8265}
RAY_TEMP_DIR=${RAY_TEMP_DIR:-/tmp/ray}      # logs and spilled objects, on a local disk
# RAY_AUTH_TOKEN_PATH                       # the token; default ~/.ray/auth_token, created here with mode 600
# -------------------------

# shellcheck source=scripts/cluster/node.sh
source "$(dirname "${BASH_SOURCE[0]}")/node.sh"
for name in HEAD_PORT DASHBOARD_PORT; do
    # Ray refuses the range in which its workers listen, with a traceback.
    if ! [[ ${!name} =~ ^[1-9][0-9]*$ ]] || ((${!name} >= 10002 && ${!name} <= 19999)); then
        cluster_refuse "expected $name to be a port outside 10002-19999, which Ray's workers take, received '${!name}'"
    fi
done
cluster_find_python
cluster_use_token create
NODE_IP=$(cluster_node_ip)
cluster_use_interface

cat <<EOT
head       $NODE_IP:$HEAD_PORT; this script stays, Ctrl-C stops this node
token      $cluster_token; every node needs the same, with mode 600
worker     bash scripts/cluster/ray_worker.sh $NODE_IP:$HEAD_PORT
launch     bash scripts/cluster/launch.sh N -- bash recipes/grpo/run_qwen3_fsdp2.sh
dashboard  http://$DASHBOARD_HOST:$DASHBOARD_PORT (ssh -L $DASHBOARD_PORT:$DASHBOARD_HOST:$DASHBOARD_PORT $NODE_IP; it asks for the token)
logs       $RAY_TEMP_DIR/session_latest/logs on every node
EOT
exec ray start --head --block --disable-usage-stats --node-ip-address="$NODE_IP" --port="$HEAD_PORT" \
    --dashboard-host="$DASHBOARD_HOST" --dashboard-port="$DASHBOARD_PORT" --temp-dir="$RAY_TEMP_DIR" "$@"
