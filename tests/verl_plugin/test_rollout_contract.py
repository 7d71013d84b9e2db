"""What the rollout side assumes of verl: methods it overrides, and those verl calls on a server."""

import inspect
import re
from pathlib import Path

import pytest
import verl.workers.rollout.llm_server as llm_server
import verl.workers.rollout.replica as replica
from verl.workers.rollout.base import BaseRollout, get_rollout_class
from verl.workers.rollout.replica import RolloutReplica, get_rollout_replica_class

from tree_rl.verl_plugin import compat
from tree_rl.verl_plugin.agent_loop_manager import TreeAgentLoopWorker
from tree_rl.verl_plugin.hf_replica import HFReplica, HFServerAdapter
from tree_rl.verl_plugin.hf_server import HFServer


def test_the_name_hf_resolves_on_both_sides() -> None:
    assert get_rollout_class("hf", "async") is HFServerAdapter
    assert get_rollout_replica_class("hf") is HFReplica
    assert not inspect.isabstract(HFReplica) and not inspect.isabstract(HFServerAdapter)


@pytest.mark.parametrize("name", ["_run_prompt", "_agent_loop_postprocess"])
def test_the_workers_overridden_methods_have_verls_parameters(name: str) -> None:
    base = compat.AgentLoopWorkerTQ.__ray_actor_class__
    parameters, expected = (
        # Ray may add a tracing parameter to the methods of an actor class.
        [p for p in inspect.signature(getattr(cls, name)).parameters if not p.startswith("_ray")]
        for cls in (TreeAgentLoopWorker, base)
    )
    assert parameters == expected


def test_the_server_answers_every_method_that_verl_calls_on_one() -> None:
    source = Path(replica.__file__).read_text() + Path(llm_server.__file__).read_text()
    called = set(re.findall(r"\bserver\.(\w+)\.remote\(", source))
    assert {"generate", "sleep", "wake_up", "abort_all_requests"} <= called
    assert {name for name in called if not hasattr(HFServer, name)} == set()


def test_the_adapter_and_the_replica_take_verls_arguments() -> None:
    for method in ("resume", "release", "update_weights"):
        ours = inspect.signature(getattr(HFServerAdapter, method)).parameters
        assert set(inspect.signature(getattr(BaseRollout, method)).parameters) - {"kwargs"} <= set(ours)
    assert HFReplica.__init__ is RolloutReplica.__init__
