"""A worker of verl grows a prompt on the embedded engine; rows, log-probs and figures are as verl gets them."""

import asyncio
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded_server import Client, build_server, describe
from gateway_harness import assert_confirmed
from omegaconf import OmegaConf
from sandboxes_here import HERE
from transformers import Qwen3ForCausalLM
from verl.trainer.ppo.v1 import agent_loop_tq

from tree_rl.rollout.branching.policies import Cut
from tree_rl.rollout.transcript import Row
from tree_rl.verl_plugin.agent_loops import prompt_forests
from tree_rl.verl_plugin.agent_loops.agent_loop_options import read_branching
from tree_rl.verl_plugin.trainer.step_metrics import branching_metrics

AGENT = "tree_rl.rollout.agents.in_environment.AgentInEnvironment"
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
COLUMNS = {"prompts": "prompt_ids", "responses": "response_ids", "response_mask": "response_mask"}
COLUMNS |= {"rollout_log_probs": "response_log_probs"}
"""verl's columns -> a row's fields."""
TWO_ENDS = {"policy": "fixed", "options": {"every_tokens": 10, "depth": 2}, "rounds": 2}


class Queue:
    """The rows and tags that a worker puts."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = defaultdict(dict)

    async def async_kv_put(self, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        self.tags[key].update(tag)

    async def async_kv_batch_put(
        self, keys: list[str], partition_id: str, tags: list[dict[str, Any]], fields: Any = None
    ) -> None:
        for index, key in enumerate(keys):
            self.tags[key].update(tags[index])
            if fields is not None:
                row = {name: fields[name].unbind()[index] for name in COLUMNS}
                self.rows[key] = {**row, "credit": fields["extra_fields"][index].get("credit")}


def run_prompt(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, branching: dict[str, Any] | None, *, validate: bool = False
) -> Queue:
    """One prompt of two sessions, whose random model writes to the end of its turn and calls no tool."""
    model = describe(model_path)
    server = build_server(model)
    # With this seed no session draws an end token.
    agent = {"agent": AGENT, "gateway": {"max_turn_tokens": 25}, "branching": branching, "seed": 1}
    agent |= {"agent_options": {"environment": "shell", "sandbox": {"unconfined": HERE.unconfined}}}
    settings = {"name": "hf", "prompt_length": 400, "response_length": 100, "n": 2, "val_kwargs": {"n": 2}}
    rollout = {**settings, "custom": {"gateway_agent": agent}}
    worker = object.__new__(prompt_forests.TreeAgentLoopWorker)
    worker.config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    worker.llm_client, worker.tokenizer, worker.processor = Client(server), model.tokenizer, None
    worker.hf_model_type = worker.dataset_cls = worker._dump_folder = worker._seeds = None
    worker.reward_loop_worker_handles, worker.distillation_enabled, worker.tools = None, False, []
    worker._finished, worker._generated = defaultdict(list), Counter()
    worker._branching = read_branching(worker.config.actor_rollout_ref.rollout.custom.gateway_agent.branching)
    queue = Queue()
    for module in (prompt_forests, agent_loop_tq):
        monkeypatch.setattr(module, "tq", queue)
    prompt = {"uid": "u", "index": 0, "global_steps": 1, "agent_name": "tree_gateway_agent", "data_source": "x"}
    prompt |= {"raw_prompt": [{"role": "user", "content": "the forest"}], "extra_info": {"check": "true"}}
    trajectory = {"step": 1, "sample_index": 0, "rollout_n": 2, "validate": validate}
    asyncio.run(worker._run_prompt(prompt, dict(SAMPLING), trajectory))
    assert not worker._finished and not worker._generated
    assert queue.tags["u"]["status"] == "finished"
    return queue


def test_branches_are_sessions_whose_log_probs_the_model_confirms(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = run_prompt(model_path, monkeypatch, TWO_ENDS)
    # Two ends in each session of 25 tokens, then the second end of the branches that left at the first.
    assert sorted(queue.rows) == [f"u_{session}_0" for session in range(8)]
    model = Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    for columns in queue.rows.values():
        row = Row(response_calls=(), **{field: tuple(columns[name].tolist()) for name, field in COLUMNS.items()})
        assert set(row.response_mask) == {1} and len(row.response_ids) == 25
        assert_confirmed(model, row)
    said = [tuple(queue.rows[f"u_{session}_0"]["responses"].tolist()) for session in range(8)]
    assert Counter(response[:10] for response in said) == {said[0][:10]: 4, said[1][:10]: 4}
    assert sorted(Counter(response[:20] for response in said).values()) == [2, 2, 2, 2]
    assert len(set(said)) == 8
    trees = [queue.rows[f"u_{session}_0"]["credit"]["tree"] for session in range(8)]
    beginnings = {(tree, response[:10]) for tree, response in zip(trees, said, strict=True)}
    assert beginnings == {(0, said[0][:10]), (1, said[1][:10])}
    keys = sorted(queue.rows)
    metrics = branching_metrics([queue.tags[key] for key in keys], torch.zeros(len(keys), dtype=torch.int64).numpy())
    assert metrics == {
        "tree/branches_per_session": 3.0,
        # The sessions; what left them after 10 and after 20 of 25 tokens; what left a branch after 20.
        "rollout/generated_tokens": 2 * (25 + 15 + 5 + 5),
        "rollout/replayed_calls": 0.0,
        "rollout/unforked_sessions": 0.0,
    }
    assert queue.tags[keys[0]]["tree_unique_len"] == len(queue.rows[keys[0]]["prompts"]) + 2 * (25 + 15 + 5 + 5)


def test_without_the_key_and_in_validation_nothing_branches(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for branching, validate in ((None, False), (TWO_ENDS, True)):
        queue = run_prompt(model_path, monkeypatch, branching, validate=validate)
        assert sorted(queue.rows) == ["u_0_0", "u_1_0"]
        assert queue.tags["u_0_0"]["prompt_branches"] == 0
        assert queue.tags["u_0_0"]["prompt_generated_tokens"] == 50


def chooses_an_unknown_session(sessions: Any, rng: Any) -> list[Cut]:
    return [Cut(session=99, token=0)]


def cuts_behind_the_end(sessions: Any, rng: Any) -> list[Cut]:
    return [Cut(session=one.session, token=token) for one in sessions for token in (-1, one.tokens)]


@pytest.mark.parametrize(
    ("policy", "budget", "unforked"),
    [(chooses_an_unknown_session, None, 0), (chooses_an_unknown_session, 1000, 0), (cuts_behind_the_end, None, 4)],
)
def test_branches_that_cannot_start_cost_no_session_and_are_counted(
    model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    policy: Any,
    budget: int | None,
    unforked: int,
) -> None:
    options = {"policy": f"{__name__}.{policy.__name__}", "budget_tokens": budget}
    queue = run_prompt(model_path, monkeypatch, options)
    tags = queue.tags["u_0_0"]
    assert sorted(queue.rows) == ["u_0_0", "u_1_0"]
    assert (tags["prompt_branches"], tags["prompt_unforked_sessions"]) == (0, unforked)
    if unforked:
        for token in (-1, 25):
            left_out = f"is left out: cut at token {token}: expected a token that session 1 generated, 0 to 24"
            assert left_out in caplog.text
        assert "Traceback" not in caplog.text
