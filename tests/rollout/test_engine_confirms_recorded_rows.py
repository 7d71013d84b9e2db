"""Recorded rows through the tree engine: the log-probs of the rollout are those of the trainer, token for token.

The rows of an edited session run as a tree. Every way to branch has its rows checked against the model in its own test.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "verl_plugin"))
import engine_harness
from equivalence import actor_loss, run, wanted_positions
from gateway_harness import misspell, talking, user

from tree_rl.rollout.gateway.session import RecordedSession
from tree_rl.rollout.transcript import Row, rows_of_calls
from tree_rl.verl_plugin.options import TreeConfig

TOLERANCE = 1e-4
"""Of a log-prob in float32."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, tiny: SimpleNamespace) -> Any:
    """The trainer's engine on the rollout's weights."""
    path = tmp_path_factory.mktemp("model")
    tiny.model.save_pretrained(path)
    return engine_harness.build_engine(path, tree=TreeConfig(mode="tree"))


async def edited(tiny: SimpleNamespace) -> RecordedSession:
    """A malformed turn in odd spelling that is dropped, a retry, two answers to one question, an edited turn."""
    broken = misspell(tiny.tokenizer, "<tool_call>\n{forest of segments\n</tool_call>")
    answers = {"go": [*broken, tiny.tokenizer.eos_token_id], "format": "every unique token", "more": "the end"}
    async with talking(tiny.backend(answers)) as talk:
        agent = talk.agent(user("go"))
        await agent.step()
        agent.messages.pop()
        await agent.step(user("format error"))
        agent.messages.pop()
        await agent.step()
        both = await talk.ask(agent.messages, n=2, max_tokens=5)
        agent.messages[-1]["content"] = both.choices[1].message.content
        await agent.step(user("more"))
        return await talk.close()


def as_verl_stores_it(row: Row) -> engine_harness.Row:
    """A row as the engines' tests write it."""
    mask = list(row.response_mask)
    return engine_harness.Row(tokens=list(row.token_ids), prompt=len(row.prompt_ids), mask=mask)


async def test_log_probs_of_the_rollout_are_the_engines(tiny: SimpleNamespace, engine: Any) -> None:
    rows = rows_of_calls((await edited(tiny)).calls)
    recorded = torch.tensor(
        [
            log_prob
            for row in rows
            for log_prob, mask in zip(row.response_log_probs or (), row.response_mask, strict=True)
            if mask
        ]
    )
    batch = engine_harness.ppo_batch([as_verl_stores_it(row) for row in rows], return_model_output=True)
    output = run(engine, batch, actor_loss("vanilla", "token-mean"))
    computed = output["model_output"]["log_probs"].values()[wanted_positions(batch)]
    assert len(computed) == len(recorded) > 15
    assert (computed - recorded).abs().max() < TOLERANCE
    assert recorded.std() > 0.1, "tokens of different probability"
