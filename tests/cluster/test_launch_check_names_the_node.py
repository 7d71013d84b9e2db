"""What the cluster check says about nodes that differ, answer nothing or lack the plugin; no cluster is started."""

import pytest

from tree_rl.verl_plugin.checks.cluster_check import (
    ClusterError,
    NodeReport,
    compare_nodes,
    examine_cluster,
    judge_cluster,
)
from tree_rl.verl_plugin.checks.doctor import Status
from tree_rl.verl_plugin.checks.fresh_process import Environment
from tree_rl.verl_plugin.launch.carried_environment import carry

HERE = Environment(
    versions={"python": "3.11.7", "tree_rl": "0.1.0", "vllm": "absent", "tree_rl code": "0011aabb"},
    missing=(),
    cause=None,
)


def report(name: str, *, missing: tuple[str, ...] = (), cause: str | None = None, **versions: str) -> NodeReport:
    found = Environment(versions={**HERE.versions, **versions}, missing=missing, cause=cause)
    return NodeReport(name=name, gpus=8, answer=found)


def test_equal_nodes_pass() -> None:
    findings = list(judge_cluster((report("a"), report("b")), HERE))
    assert [finding.status for finding in findings] == [Status.OK, Status.OK]
    assert "8 GPUs" in findings[0].detail


@pytest.mark.parametrize(("subject", "found"), [("tree_rl", "0.2.0"), ("vllm", "0.24.0"), ("tree_rl code", "absent")])
def test_node_that_differs_is_named_with_both_versions(subject: str, found: str) -> None:
    findings = list(judge_cluster((report("a"), report("b", **{subject: found})), HERE))
    assert [finding.status for finding in findings] == [Status.OK, Status.FAILED]
    assert findings[1].subject == "node b"
    assert f"{subject} {found} (here {HERE.versions[subject]})" in findings[1].detail


def test_missing_plugin_fails_although_versions_agree() -> None:
    (finding,) = judge_cluster((report("a", missing=("tree_sync",), cause="ImportError: no tree"),), HERE)
    assert finding.status is Status.FAILED
    assert finding.detail == "verl does not know tree_sync: ImportError: no tree"


def test_silent_node_fails() -> None:
    silent = NodeReport(name="b", gpus=0, answer="the node died")
    (finding,) = judge_cluster((silent,), HERE)
    assert (finding.subject, finding.status) == ("node b", Status.FAILED)
    assert "the node died" in finding.detail


def test_absent_head_is_named_before_ray_asks_for_it() -> None:
    with pytest.raises(ClusterError, match=r"nothing listens at 127\.0\.0\.1:1 after 0 s.*ray_head\.sh"):
        examine_cluster(address="127.0.0.1:1", nodes=2, wait_seconds=0)


def test_table_marks_what_differs() -> None:
    silent = NodeReport(name="c", gpus=0, answer="the node died")
    header, _, here, *nodes = compare_nodes((report("a"), report("b", tree_rl="0.2.0"), silent), HERE).splitlines()
    assert header.split()[:2] == ["node", "python"] and here.startswith("(this process)")
    assert ["*" in line for line in nodes] == [False, True, False]
    assert "0.2.0*" in nodes[1]


def test_recipes_variables_reach_nodes_that_run_already(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PYTHONPATH": "a", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3", "HF_TOKEN": "secret"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    carried = carry({"working_dir": None, "env_vars": {"NCCL_DEBUG": "WARN"}})
    assert carried["working_dir"] is None
    assert carried["env_vars"]["PYTHONPATH"] == "a" and carried["env_vars"]["OMP_NUM_THREADS"] == "3"
    assert carried["env_vars"]["NCCL_DEBUG"] == "WARN"
    assert not {"HF_TOKEN", "RAY_ADDRESS", "PATH", "CUDA_VISIBLE_DEVICES"} & set(carried["env_vars"])
    assert carry(None)["env_vars"]["PYTHONPATH"] == "a"
