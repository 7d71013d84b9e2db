"""Everything that tree_rl assumes of verl beyond its documented plug points: names, signatures, attributes."""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import verl
from verl_checkout import ATTRIBUTES, CALLED, OVERRIDDEN, broken, overridden, parameters

import tree_rl.verl_plugin
from tree_rl.verl_plugin import compat
from tree_rl.verl_plugin.agent_loops import tool_agent_loop
from tree_rl.verl_plugin.embedded_rollout import replica as hf_replica
from tree_rl.verl_plugin.embedded_rollout.server import HFServer

LINES = [
    ("PPOTrainer._balance_batch", "worker_group._dispatch_info[role] = dp_rank_mapping"),
    ("PPOTrainer._balance_batch", "worker_group._query_dispatch_info(role)"),
    # Separate rollouts get no adapter: where this changes, the refusal `leaves_adapter_behind` may go.
    ("ActorRolloutRefWorker.update_weights", "per_tensor_param, _ = self.actor.engine.get_per_tensor_param()"),
]


def resolve(path: str) -> Any:
    first, *rest = path.split(".")
    target = getattr(compat, first)
    target = getattr(target, "__ray_actor_class__", target)
    for part in rest:
        target = getattr(target, part)
    return target


@pytest.mark.parametrize("name", [*compat.PRIVATE_NAMES, *compat.PRIVATE_MODULES])
def test_name_exists_where_compat_says(name: str) -> None:
    if name in compat.PRIVATE_MODULES:
        assert getattr(compat, name) is import_module(compat.PRIVATE_MODULES[name])
    else:
        assert getattr(compat, name) is getattr(import_module(compat.PRIVATE_NAMES[name]), name)


@pytest.mark.parametrize("module", tree_rl.verl_plugin.REGISTRATIONS)
def test_a_module_whose_import_we_wait_for_exists(module: str) -> None:
    if module.startswith("vllm."):
        pytest.importorskip("vllm", reason="scripts/test_vllm.sh has vLLM")
    assert import_module(module).__name__ == module


@pytest.mark.parametrize("call", [*CALLED, *overridden()])
def test_signature_is_the_one_we_call_or_replace(call: str) -> None:
    path = call.split("(")[0]
    assert f"{path}({', '.join(parameters(resolve(path)))})" == call


@pytest.mark.parametrize("ours", OVERRIDDEN, ids=lambda cls: cls.__name__)
def test_every_override_is_in_the_contract(ours: type) -> None:
    listed = {name for _, names in OVERRIDDEN.values() for name in names.split()}
    mine = {name for cls in ours.__mro__ if cls.__module__.startswith("tree_rl.") for name in vars(cls)}
    members = [vars(cls).items() for cls in ours.__mro__ if cls.__module__.startswith("verl.")]
    verls = {name for of_class in members for name, value in of_class if inspect.isfunction(value)}
    assert mine & verls <= listed


@pytest.mark.parametrize("base", ATTRIBUTES)
def test_attributes_are_set_by_verl(base: str) -> None:
    source = "".join(inspect.getsource(cls) for cls in resolve(base).__mro__ if cls.__module__.startswith("verl."))
    names = ATTRIBUTES[base].split()
    assert [name for name in names if not re.search(rf"self\.{name}(:[^=]+|, self\.\w+)* = ", source)] == []


@pytest.mark.parametrize(("path", "line"), LINES)
def test_verl_has_a_line_that_we_rely_on(path: str, line: str) -> None:
    assert line in inspect.getsource(resolve(path))


def test_verls_worker_has_the_classes_that_ours_replaces() -> None:
    assert {"actor_worker_cls", "ref_worker_cls"} <= vars(compat.ActorRolloutRefWorker).keys()


def test_the_name_hf_resolves_on_both_sides() -> None:
    get_rollout_class = import_module("verl.workers.rollout.base").get_rollout_class
    get_replica_class = import_module("verl.workers.rollout.replica").get_rollout_replica_class
    assert get_rollout_class("hf", "async") is hf_replica.HFServerAdapter
    assert get_replica_class("hf") is hf_replica.HFReplica
    for cls in (hf_replica.HFReplica, hf_replica.HFServerAdapter, tool_agent_loop.TreeToolAgentLoop):
        assert not inspect.isabstract(cls)


def test_the_server_answers_every_method_that_verl_calls_on_one() -> None:
    modules = ("verl.workers.rollout.replica", "verl.workers.rollout.llm_server")
    source = "".join(inspect.getsource(import_module(module)) for module in modules)
    called = set(re.findall(r"\bserver\.(\w+)\.remote\(", source))
    assert {"generate", "sleep", "wake_up", "abort_all_requests"} <= called
    assert {name for name in called if not hasattr(HFServer, name)} == set()


def test_the_adapter_and_the_replica_take_verls_arguments() -> None:
    base = import_module("verl.workers.rollout.base").BaseRollout
    for method in ("resume", "release", "update_weights"):
        ours = parameters(getattr(hf_replica.HFServerAdapter, method))
        assert set(parameters(getattr(base, method))) - {"kwargs"} <= set(ours)
    assert hf_replica.HFReplica.__init__ is import_module("verl.workers.rollout.replica").RolloutReplica.__init__


def test_functions_of_private_modules_are_in_the_contract() -> None:
    alias = {"tu": "tensordict_utils", "tq": "transfer_queue"}
    used = set()
    plugin = Path(tree_rl.verl_plugin.__file__).parent
    for path in [*plugin.rglob("*.py"), *(plugin.parent / "benchmark" / "against_verl").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in alias:
                used.add(f"{alias[node.value.id]}.{node.attr}")
    assert used <= {call.split("(")[0] for call in CALLED}


def test_a_checkout_of_verl_is_judged_without_running_it(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Path(verl.__file__).parents[1]
    assert broken(installed, [*CALLED, *overridden()]) == []
    gone = {"gone": "verl.nowhere", "critic_loss": "verl.workers.utils.losses"}
    monkeypatch.setattr(compat, "PRIVATE_NAMES", compat.PRIVATE_NAMES | gone)
    assert broken(installed, ["value_loss(config, data)", "FSDPEngineWithLMHead.no_such_hook()"]) == [
        "no FSDPEngineWithLMHead.no_such_hook in verl.workers.engine.fsdp.transformer_impl",
        "no critic_loss in verl.workers.utils.losses",
        "no module verl.nowhere, for gone",
        "value_loss(config, model_output, data, dp_group), here (config, data)",
    ]


def test_only_supported_versions_and_known_names_of_verl_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat.check_verl_version() in compat.SUPPORTED_VERL
    monkeypatch.setattr(compat, "version", lambda _: "0.8.0")
    with pytest.raises(ImportError, match=r"found verl 0\.8\.0"):
        compat.check_verl_version()
    with pytest.raises(AttributeError, match="no_such_name"):
        compat.no_such_name  # noqa: B018
