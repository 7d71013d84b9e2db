#!/usr/bin/env bash
# Brings up a KubeRay cluster of N nodes, and submits launch.sh to it as a Ray job.
# Use: IMAGE=registry/tree_rl:gpu bash scripts/cluster/kubernetes.sh N -- bash recipes/grpo/run_qwen3_fsdp2.sh [overrides]
# Paths are those of the pods. Variables of this shell do not travel; set them in the command: N -- env STEPS=100 bash ...
set -euo pipefail

# ---- user-adjustable ----
IMAGE=${IMAGE:-tree_rl:gpu}          # built from docker/Dockerfile.gpu
NAMESPACE=${NAMESPACE:-default}
WAIT_SECONDS=${WAIT_SECONDS:-1800}   # for the pods: images are large
# -------------------------

# shellcheck source=scripts/cluster/node.sh
source "$(dirname "${BASH_SOURCE[0]}")/node.sh"
cluster_read_command "$@"
command -v kubectl >/dev/null || cluster_refuse "no kubectl on PATH; install it and point it to the cluster"
[[ $IMAGE =~ ^[A-Za-z0-9._:/@-]+$ ]] || cluster_refuse "expected IMAGE to name an image, received '$IMAGE'"

manifest=$(sed -E -e "s|: [0-9]+ # nodes - 1$|: $((NNODES - 1))|" -e "s|image: \&image .*|image: \&image $IMAGE|" \
    "$cluster_root/scripts/cluster/raycluster.yaml")
kubectl --namespace "$NAMESPACE" apply -f - <<<"$manifest"
kubectl --namespace "$NAMESPACE" wait raycluster/tree-rl --for=condition=RayClusterProvisioned --timeout="${WAIT_SECONDS}s"
head=$(kubectl --namespace "$NAMESPACE" get pod --selector ray.io/cluster=tree-rl,ray.io/node-type=head --output name)

echo "dashboard  kubectl --namespace $NAMESPACE port-forward service/tree-rl-head-svc 8265:8265, then http://127.0.0.1:8265"
echo "token      kubectl --namespace $NAMESPACE get secret tree-rl --output jsonpath={.data.auth_token} | base64 -d"
echo "stop       kubectl --namespace $NAMESPACE delete raycluster tree-rl"
exec kubectl --namespace "$NAMESPACE" exec "$head" --container ray-head -- \
    bash -lc 'cd /opt/tree_rl && exec bash scripts/cluster/submit.sh "$@"' submit "$NNODES" -- "${cluster_command[@]}"
