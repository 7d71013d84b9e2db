"""`tree-rl doctor`: checks if the installation can train. Imports everything."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from tree_rl.extras import require_modules
from tree_rl.inspection.files.terminal import fail, one_line_errors, say

if TYPE_CHECKING:
    from tree_rl.verl_plugin.checks.doctor import Finding


def check_installation(
    no_ray: Annotated[bool, typer.Option("--no-ray", help="Skip the check inside a Ray worker.")] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Compare every node of a running cluster with this process.")
    ] = False,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes that the cluster must have.")] = None,
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT of the head. Default: RAY_ADDRESS, or this machine.")
    ] = None,
    wait_seconds: Annotated[float, typer.Option(min=0, help="How long to wait for the nodes.")] = 60.0,
) -> None:
    """Check versions, plugin, devices, kernels, and one tree against its rows. Exit code 1 if a check fails.

    With --cluster: compare versions, code and plugin on every node of a running Ray cluster with this process.
    """
    require_modules("doctor", "verl")
    if cluster:
        with one_line_errors():
            _report(_examine_cluster(address, nodes, wait_seconds))
        return
    if nodes is not None or address is not None:
        fail("--nodes and --address need --cluster")
    # torch, verl and ray take twenty seconds to import; inspect and plan do not need them.
    from tree_rl.verl_plugin.checks.doctor import diagnose

    with one_line_errors():
        _report(diagnose(start_ray=not no_ray))


def _examine_cluster(address: str | None, nodes: int | None, wait_seconds: float) -> Iterator["Finding"]:
    # ray and verl take seconds to import; other commands do not need them.
    from tree_rl.verl_plugin.checks.doctor_of_cluster import ClusterError, compare_nodes, examine_cluster, judge_cluster
    from tree_rl.verl_plugin.checks.fresh_process import examine_here

    try:
        found = examine_cluster(address=address, nodes=nodes, wait_seconds=wait_seconds)
    except ClusterError as error:
        fail(f"doctor: {error}", code=1)
    here = examine_here()
    say(compare_nodes(found.nodes, here) + "\n")
    say(f"dashboard  {found.dashboard}\nlogs       {found.logs} on every node\n")
    return judge_cluster(found.nodes, here)


def _report(findings: Iterable["Finding"]) -> None:
    """Print findings as they arrive; exit code 1 if any failed."""
    failed = []
    for finding in findings:
        say(f"{finding.subject:<26}  {finding.status:<6}  {finding.detail}")
        if finding.status == "failed":
            failed.append(finding.subject)
    if failed:
        fail(f"{len(failed)} failed: {', '.join(failed)}", code=1)
    say("\nReady.")
