"""Checks a running Ray cluster: compares every node's versions, code and plugin with those of this process.

A task on each node starts a new process there, which has the environment of verl's workers on that node.
"""

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tree_rl.inspection.text import format_table
from tree_rl.verl_plugin.checks.doctor import Finding, Status
from tree_rl.verl_plugin.checks.fresh_process import PROBE_SECONDS, Environment, probe_task, read_environment

POLL_SECONDS = 1.0


class ClusterError(RuntimeError):
    """No cluster answers, or nodes are missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """The answer of one node."""

    name: str
    """Address and host name."""
    gpus: int
    """Number of GPUs that Ray counts on the node."""
    answer: Environment | str
    """The node's environment, or the reason why it did not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterReport:
    """A running cluster."""

    dashboard: str
    logs: str
    """Folder of Ray's logs, the same on every node."""
    nodes: tuple[NodeReport, ...]
    """Nodes that are alive, the head first."""


def examine_cluster(*, address: str | None, nodes: int | None, wait_seconds: float) -> ClusterReport:
    """Connect to a cluster, wait until `nodes` (None: any) are alive, and examine each.

    `address` is the head's `HOST:PORT`; None means RAY_ADDRESS, or the cluster of this machine. Raises a ClusterError
    if no cluster answers, its token is not this process's, or nodes are missing after the wait.
    """
    # Without an address and without a cluster, `ray.init` would start a new one.
    address = address or os.environ.get("RAY_ADDRESS", "auto")
    _require_listener(address, wait_seconds)
    try:
        context = ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"no cluster answers at {'this machine' if address == 'auto' else address}: {_first_line(str(error))}. "
            "Start it with scripts/cluster/ray_head.sh (`tree-rl recipes` writes it); one with a token needs "
            "RAY_AUTH_MODE=token and the head's token in this process"
        ) from error
    try:
        return ClusterReport(
            dashboard=f"http://{context.dashboard_url}" if context.dashboard_url else "not running",
            logs=f"{context.address_info['session_dir']}/logs",
            nodes=_examine(_wait_for(nodes, wait_seconds)),
        )
    finally:
        ray.shutdown()


def judge_cluster(reports: tuple[NodeReport, ...], expected: Environment) -> Iterator[Finding]:
    """Yield one finding per node with its differences from `expected`, the launching process's environment."""
    for report in reports:
        problem = _problem(report, expected)
        gpus = f", {report.gpus} GPUs" if report.gpus else ""
        yield Finding(
            subject=f"node {report.name}",
            status=Status.FAILED if problem else Status.OK,
            detail=problem or f"versions and code as here, plugin live{gpus}",
        )


def compare_nodes(reports: tuple[NodeReport, ...], expected: Environment) -> str:
    """A table with one row per node; an asterisk marks differences from the first row, the launching process."""
    header = ["node", *expected.versions, "plugin"]
    rows = []
    here = NodeReport(name="(this process)", gpus=0, answer=expected)
    for report in (here, *reports):
        found = report.answer
        if isinstance(found, str):
            rows.append([report.name, *["?" for _ in header[1:]]])
            continue
        versions = found.versions
        marked = [versions[key] + ("" if versions[key] == wanted else "*") for key, wanted in expected.versions.items()]
        rows.append([report.name, *marked, "missing" if found.missing else "live"])
    return format_table(header, rows, flush_left=len(header))


def _require_listener(address: str, wait_seconds: float) -> None:
    # Ray would try to reach an absent head for minutes, without a clear message.
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdecimal():
        return
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"nothing listens at {address} after {wait_seconds:.0f} s ({error}); start "
                    "scripts/cluster/ray_head.sh (of `tree-rl recipes`) there, or set RAY_ADDRESS to the address "
                    "that it prints"
                ) from error
        time.sleep(POLL_SECONDS)


def _wait_for(nodes: int | None, wait_seconds: float) -> list[dict[str, Any]]:
    deadline = time.monotonic() + wait_seconds
    while True:
        alive = [node for node in ray.nodes() if node["Alive"]]
        if len(alive) >= (nodes or 1):
            return sorted(alive, key=lambda node: ("node:__internal_head__" not in node["Resources"], _name(node)))
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{len(alive)} of {nodes} nodes are alive after {wait_seconds:.0f} s: {', '.join(map(_name, alive))}. "
                "Look at the output of ray_worker.sh on the missing ones: another version of Python or Ray, another "
                "token, or an unreachable head keeps a node out"
            )
        time.sleep(POLL_SECONDS)


def _examine(nodes: list[dict[str, Any]]) -> tuple[NodeReport, ...]:
    probe = ray.remote(num_cpus=0, max_retries=0)(probe_task())
    pinned = [NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False) for node in nodes]
    answers = [probe.options(scheduling_strategy=place).remote() for place in pinned]
    return tuple(_read_report(node, answer) for node, answer in zip(nodes, answers, strict=True))


def _read_report(node: dict[str, Any], answer: Any) -> NodeReport:
    found: Environment | str
    try:
        found = read_environment(ray.get(answer, timeout=PROBE_SECONDS + 60))
    except ray.exceptions.RayError as error:
        found = _first_line(str(error))
    except RuntimeError as error:
        found = str(error)
    return NodeReport(name=_name(node), gpus=int(node["Resources"].get("GPU", 0)), answer=found)


def _problem(report: NodeReport, expected: Environment) -> str | None:
    found = report.answer
    if isinstance(found, str):
        return f"did not answer: {found}"
    differing = [
        f"{subject} {found.versions[subject]} (here {wanted})"
        for subject, wanted in expected.versions.items()
        if found.versions[subject] != wanted
    ]
    if differing:
        return f"differs in {', '.join(differing)}; install the same constraints file and the same code on every node"
    if found.missing:
        cause = found.cause or "install the package there (pip install -e .)"
        return f"verl does not know {', '.join(found.missing)}: {cause}"
    return None


def _name(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']})"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")
