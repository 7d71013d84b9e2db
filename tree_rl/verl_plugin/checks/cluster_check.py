"""Findings about a running Ray cluster: every node's versions, code and plugin, against the process that asks.

A task pinned to each node looks in a fresh process there, where nothing of tree_rl has been imported: what it sees is
what verl's workers on that node will see.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tree_rl.verl_plugin.checks.doctor import ENGINES, POLICY, TRAINER, Finding, Status
from tree_rl.verl_plugin.compat import import_statement

COMPARED = ("tree_rl", "verl", "torch", "ray", "transformers", "vllm", "TransferQueue")
PROBE_SECONDS = 240
POLL_SECONDS = 1.0

# Versions, a fingerprint of the sources, and what verl registered by its own plugin discovery. Prints one line of JSON.
NODE_PROBE = f"""
import hashlib, json, os, platform, sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


def installed(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def fingerprint(package):
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(list(found.submodule_search_locations)[0])
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\\0" + file.read_bytes())
    return digest.hexdigest()[:8]


facts = {{"python": platform.python_version(), "executable": sys.executable}}
facts["versions"] = {{package: installed(package) for package in {COMPARED!r}}}
facts["code"] = {{package: fingerprint(package) for package in ("tree_rl", "tree_kernels")}}
facts["policy"] = os.environ.get({POLICY!r})
facts["registered"], facts["cause"] = [], None
try:
    {import_statement("TRAINER_REGISTRY")}
    {import_statement("EngineRegistry")}
    facts["registered"] = sorted(EngineRegistry._engines) + sorted(TRAINER_REGISTRY)
except Exception as error:
    facts["cause"] = f"{{type(error).__name__}}: {{error}}"
print(json.dumps(facts))
"""


class ClusterError(RuntimeError):
    """There is no cluster to look at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What one process of a node finds installed."""

    versions: dict[str, str]
    """Subject -> version or fingerprint; "absent" where there is none. The same subjects on every node."""
    missing: tuple[str, ...]
    """Names that verl should know from the plugin and does not."""
    cause: str | None
    """Why they are missing, where the process could tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """One node, and what it found."""

    name: str
    """Address and host name."""
    gpus: int
    """GPUs that Ray counts there."""
    environment: Environment | None
    """Its environment; None if the node did not answer."""
    failure: str | None
    """Why it did not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterReport:
    """A running cluster."""

    dashboard: str
    """Where its dashboard is."""
    logs: str
    """Folder of its logs, the same on every node."""
    nodes: tuple[NodeReport, ...]
    """Living nodes, the head first."""


def examine_cluster(*, address: str | None, nodes: int | None, wait_seconds: float) -> ClusterReport:
    """Connect to a cluster, wait for its nodes, and look at each.

    Args:
        address: the head's `HOST:PORT`; None takes RAY_ADDRESS, or the cluster of this machine.
        nodes: nodes that must be alive; None takes those that are.
        wait_seconds: how long to wait for them.

    Raises:
        ClusterError: no cluster answers, its token is not this process's, or nodes are missing when the time is over.
    """
    # Without an address and without a cluster, `ray.init` would start one of its own.
    address = address or os.environ.get("RAY_ADDRESS", "auto")
    _require_listener(address, wait_seconds)
    try:
        context = ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"no cluster answers at {'this machine' if address == 'auto' else address}: {_first_line(str(error))}. "
            "Start it with scripts/cluster/ray_head.sh; one with a token needs RAY_AUTH_MODE=token and the head's "
            "token in this process"
        ) from error
    try:
        return ClusterReport(
            dashboard=f"http://{context.dashboard_url}" if context.dashboard_url else "not running",
            logs=f"{context.address_info['session_dir']}/logs",
            nodes=_examine(_wait_for(nodes, wait_seconds)),
        )
    finally:
        ray.shutdown()


def examine_here() -> Environment:
    """The environment of this machine's Python, seen from a fresh process."""
    printed = subprocess.run(
        [sys.executable, "-c", NODE_PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS, check=True
    )
    return _read_environment(printed.stdout)


def judge_cluster(reports: tuple[NodeReport, ...], expected: Environment) -> Iterator[Finding]:
    """Hold every node against the process that launches.

    Args:
        reports: the nodes.
        expected: the environment of the launching process.

    Yields:
        One finding per node; a failed one says what differs and where.
    """
    for report in reports:
        problem = _problem(report, expected)
        gpus = f", {report.gpus} GPUs" if report.gpus else ""
        yield Finding(
            subject=f"node {report.name}",
            status=Status.FAILED if problem else Status.OK,
            detail=problem or f"versions and code as here, plugin live{gpus}",
        )


def format_table(reports: tuple[NodeReport, ...], expected: Environment) -> str:
    """One row per node; an asterisk marks what differs from the first row, the launching process."""
    subjects = list(expected.versions)
    rows = [["node", *subjects, "plugin"], ["(this process)", *expected.versions.values(), _plugin_word(expected)]]
    for report in reports:
        if report.environment is None:
            rows.append([report.name, *["?" for _ in subjects], "?"])
            continue
        found = report.environment.versions
        marked = [found[name] + ("" if found[name] == expected.versions[name] else "*") for name in subjects]
        rows.append([report.name, *marked, _plugin_word(report.environment)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _require_listener(address: str, wait_seconds: float) -> None:
    # Ray itself asks a head that is not there for minutes, and says little.
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
                    "scripts/cluster/ray_head.sh there, or set RAY_ADDRESS to the address that it prints"
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
    probe = ray.remote(num_cpus=0, max_retries=0)(_probe_task())
    pinned = [NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False) for node in nodes]
    answers = [probe.options(scheduling_strategy=place).remote(NODE_PROBE, PROBE_SECONDS) for place in pinned]
    return tuple(_read_report(node, answer) for node, answer in zip(nodes, answers, strict=True))


def _read_report(node: dict[str, Any], answer: Any) -> NodeReport:
    environment, failure = None, None
    try:
        code, printed, complaint = ray.get(answer, timeout=PROBE_SECONDS + 60)
    except ray.exceptions.RayError as error:
        failure = _first_line(str(error))
    else:
        if code:
            failure = _last_line(complaint)
        else:
            environment = _read_environment(printed)
    return NodeReport(
        name=_name(node), gpus=int(node["Resources"].get("GPU", 0)), environment=environment, failure=failure
    )


def _probe_task() -> Callable[[str, int], tuple[int, str, str]]:
    # Nested, so that it travels by value: a node unpickles a module-level function by importing tree_rl, which would
    # fail where tree_rl is absent, and load the plugin where verl does not.
    def probe(code: str, seconds: int) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds, check=False
        )
        return done.returncode, done.stdout, done.stderr

    return probe


def _read_environment(printed: str) -> Environment:
    facts = json.loads(printed.splitlines()[-1])
    versions = {"python": facts["python"], **facts["versions"]}
    versions |= {f"{package} code": digest for package, digest in facts["code"].items()}
    missing = sorted({*ENGINES, TRAINER} - set(facts["registered"]))
    cause = facts["cause"] or (f"{POLICY}={facts['policy']}" if facts["policy"] else None)
    return Environment(
        versions={subject: found or "absent" for subject, found in versions.items()},
        missing=tuple(missing),
        cause=cause,
    )


def _problem(report: NodeReport, expected: Environment) -> str | None:
    if report.environment is None:
        return f"did not answer: {report.failure}"
    found = report.environment
    differing = [
        f"{subject} {found.versions[subject]} (here {wanted})"
        for subject, wanted in expected.versions.items()
        if found.versions[subject] != wanted
    ]
    if differing:
        return f"differs in {', '.join(differing)}; install the same constraints file and the same code on every node"
    if found.missing:
        cause = found.cause or "install the package there (pip install -e .), code on a path alone has no entry point"
        return f"verl does not know {', '.join(found.missing)}: {cause}"
    return None


def _plugin_word(environment: Environment) -> str:
    return "missing" if environment.missing else "live"


def _name(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']})"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"
