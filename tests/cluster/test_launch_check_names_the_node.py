"""What the cluster check says about nodes that differ, answer nothing or lack the plugin; no cluster is started."""

import pytest

from tree_rl.verl_plugin.checks import doctor_of_cluster as check
from tree_rl.verl_plugin.checks.doctor import Status
from tree_rl.verl_plugin.checks.fresh_process import Environment
from tree_rl.verl_plugin.launch.carried_environment import carry

VERSIONS = {"python": "3.11.7", "tree_rl": "0.1.0", "vllm": "absent", "tree_rl code": "0011aabb"}
HERE = Environment(versions=VERSIONS, missing=(), cause=None)


def report(name: str, *, missing: tuple[str, ...] = (), cause: str | None = None, **versions: str) -> check.NodeReport:
    found = Environment(versions={**VERSIONS, **versions}, missing=missing, cause=cause)
    return check.NodeReport(name=name, gpus=8, answer=found)


SILENT = check.NodeReport(name="b", gpus=0, answer="the node died")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (report("b", tree_rl="0.2.0"), "tree_rl 0.2.0 (here 0.1.0)"),
        (report("b", vllm="0.24.0"), "vllm 0.24.0 (here absent)"),
        (report("b", **{"tree_rl code": "absent"}), "tree_rl code absent (here 0011aabb)"),
        (report("b", missing=("tree_sync",), cause="ImportError: no"), "verl does not know tree_sync: ImportError: no"),
        (SILENT, "the node died"),
    ],
)
def test_a_node_that_differs_lacks_the_plugin_or_is_silent_is_named(other: check.NodeReport, said: str) -> None:
    good, bad = check.judge_cluster((report("a"), other), HERE)
    assert good.status is Status.OK and "8 GPUs" in good.detail
    assert (bad.subject, bad.status) == ("node b", Status.FAILED) and said in bad.detail


def test_absent_head_is_named_before_ray_asks_for_it() -> None:
    with pytest.raises(check.ClusterError, match=r"nothing listens at 127\.0\.0\.1:1 after 0 s.*ray_head\.sh"):
        check.examine_cluster(address="127.0.0.1:1", nodes=2, wait_seconds=0)


def test_table_marks_what_differs() -> None:
    head, _, here, *nodes = check.compare_nodes((report("a"), report("b", tree_rl="0.2.0"), SILENT), HERE).splitlines()
    assert head.split()[:2] == ["node", "python"] and here.startswith("(this process)")
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
