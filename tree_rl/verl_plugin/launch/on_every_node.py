"""Runs one command on N nodes of a Ray cluster at once: for programs that torch.distributed.run starts, such as SFT.

Use: python -m tree_rl.verl_plugin.launch.on_every_node N -- COMMAND. The command gets NNODES, NODE_RANK and HEAD_NODE
in its environment, and all GPUs of its node. The first command that fails ends the others.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def run_on_every_node(nodes: int, command: list[str]) -> int:
    """Run a command once on each of `nodes` nodes, this one first, in the working folder of this process.

    Returns 0, or the exit code of the first node that failed; raises a RuntimeError if fewer nodes are alive.
    """
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), logging_level="ERROR")
    try:
        here = ray.get_runtime_context().get_node_id()
        alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != here)
        if len(alive) < nodes:
            raise RuntimeError(f"expected {nodes} nodes, found {len(alive)} alive; start ray_worker.sh on the others")
        running = [_start(rank, node, alive[0], nodes, command) for rank, node in enumerate(alive[:nodes])]
        while running:
            done, running = ray.wait(running)
            code = int(ray.get(done[0]))
            if code:
                return code
        return 0
    finally:
        # Ends the running tasks and the processes that they started.
        ray.shutdown()


def _start(rank: int, node: dict[str, Any], first: dict[str, Any], nodes: int, command: list[str]) -> Any:
    task = ray.remote(_run_task()).options(
        num_cpus=0,
        num_gpus=node["Resources"].get("GPU", 0),
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False),
    )
    variables = {"NNODES": str(nodes), "NODE_RANK": str(rank), "HEAD_NODE": first["NodeManagerAddress"]}
    return task.remote(command, variables, os.getcwd())


def _run_task() -> Callable[[list[str], dict[str, str], str], int]:
    # A nested function is pickled by value, so the node needs no tree_rl to start the command.
    def run(command: list[str], variables: dict[str, str], folder: str) -> int:
        return subprocess.run(command, env={**os.environ, **variables}, cwd=folder, check=False).returncode

    return run


if __name__ == "__main__":
    if len(sys.argv) < 4 or not sys.argv[1].isdecimal() or sys.argv[2] != "--":
        sys.exit("usage: python -m tree_rl.verl_plugin.launch.on_every_node N -- COMMAND")
    sys.exit(run_on_every_node(int(sys.argv[1]), sys.argv[3:]))
