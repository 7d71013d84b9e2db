"""A Ray cluster of two nodes on this machine, until standard input ends: prints its address and its raylets."""

import json
import sys

from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 12, "num_gpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=12, num_gpus=1)
raylets = [node.all_processes["raylet"][0].process.pid for node in (cluster.head_node, second)]
print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
sys.stdin.read()
cluster.shutdown()
