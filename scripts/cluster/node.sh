#!/usr/bin/env bash
# What the scripts of this folder share: the Python environment, Ray's token, refusals. Use: source it.
# shellcheck disable=SC2034 # cluster_token and cluster_command are for the scripts that source this

cluster_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# shellcheck source=scripts/ray_token.sh
source "$cluster_root/scripts/ray_token.sh"

cluster_refuse() {
    echo "${0##*/}: $*" >&2
    exit 2
}

# Puts one Python and its `ray` on PATH: PYTHON, else the active environment, else ./.venv, else python3.
cluster_find_python() {
    if [[ -z ${PYTHON:-} && -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -x $cluster_root/.venv/bin/python ]]; then
        PYTHON=$cluster_root/.venv/bin/python
    fi
    PYTHON=$(command -v "${PYTHON:-python3}") || cluster_refuse "no Python found; install python3 or set PYTHON=/path/to/python"
    PATH="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH"
    command -v ray >/dev/null || cluster_refuse "no ray beside $PYTHON; install tree_rl there (README.md) or set PYTHON to another one"
    export PYTHON PATH PYTHONSAFEPATH=1 # the latter keeps the folder kernels/ from posing as the package of that name
}

# Prints the address by which other nodes reach this one: NODE_IP, else that of INTERFACE, else the one Ray finds.
cluster_node_ip() {
    local found=${NODE_IP:-}
    if [[ -z $found && -n ${INTERFACE:-} ]]; then
        found=$(ip -4 -o address show dev "$INTERFACE" 2>/dev/null | awk '{sub("/.*", "", $4); print $4; exit}')
        [[ -n $found ]] || cluster_refuse "INTERFACE=$INTERFACE has no IPv4 address here; 'ip -4 -o address' lists those that have"
    fi
    echo "${found:-$("$PYTHON" -c 'import ray; print(ray.util.get_node_ip_address())')}"
}

# One name for the network between nodes: Ray, NCCL's bootstrap and gloo have to agree on it.
cluster_use_interface() {
    if [[ -n ${INTERFACE:-} ]]; then
        export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$INTERFACE} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$INTERFACE}
    fi
}

# Nodes that share a network always run with Ray's token, whatever the calling shell has switched off.
cluster_use_token() {
    export RAY_AUTH_MODE=token
    if [[ -n ${RAY_AUTH_TOKEN:-} ]]; then
        cluster_token="from RAY_AUTH_TOKEN"
        return
    fi
    export RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
    cluster_token="in $RAY_AUTH_TOKEN_PATH"
    if [[ ${1:-} == create ]]; then
        # Ray would create the file readable for everybody.
        ray_token_create "$RAY_AUTH_TOKEN_PATH" || cluster_refuse "cannot write the token to $RAY_AUTH_TOKEN_PATH; set RAY_AUTH_TOKEN_PATH to a file of yours"
    fi
    [[ -s $RAY_AUTH_TOKEN_PATH ]] || cluster_refuse "no token in $RAY_AUTH_TOKEN_PATH; copy the head's file here (scp -p HEAD:.ray/auth_token ~/.ray/auth_token), or set RAY_AUTH_TOKEN_PATH to a disk that the nodes share"
    local mode
    mode=$(stat -L -c %a "$RAY_AUTH_TOKEN_PATH")
    [[ ${mode: -2} == 00 ]] || cluster_refuse "others can read the token in $RAY_AUTH_TOKEN_PATH (mode $mode, expected 600); who reads it runs code on every node: chmod 600 $RAY_AUTH_TOKEN_PATH"
}

# Leaves the number of nodes in NNODES and the command in cluster_command.
cluster_read_command() {
    [[ ${1:-} =~ ^[1-9][0-9]*$ ]] || cluster_refuse "expected the number of nodes first, received '${1:-nothing}'; for example: ${0##*/} 2 -- bash recipes/grpo/run_qwen3_fsdp2.sh"
    export NNODES=$1
    shift
    [[ ${1:-} == -- ]] && shift
    (($#)) || cluster_refuse "expected a command after the number of nodes; for example: ${0##*/} $NNODES -- bash recipes/grpo/run_qwen3_fsdp2.sh"
    cluster_command=("$@")
}
