"""Recorded rows through the tree engine: the log-probs of the rollout are those of the trainer, token for token.

Everything that makes a session branch is among them; the rows of a scenario run as trees.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "verl_plugin"))
import engine_harness
from equivalence import actor_loss, run, wanted_positions
from gateway_harness import Agent, misspell, run_session
from react_scripts import BOTH, COPY, DONE, by_turn, call, play, shell, thinking
from sampled_turns import two_turns_sampled

from tree_rl.rollout.agents.react import SUMMARISE, ReActOptions
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


def drift(tiny: SimpleNamespace) -> list[RecordedSession]:
    """Sampled turns that change when they are tokenized again: kept, and branched."""
    reused, branched = (two_turns_sampled(tiny, on_drift, samples=5) for on_drift in ("reuse", "branch"))
    assert any(record.drift.num_avoided for record in reused) and any(record.drift.siblings for record in branched)
    return [*reused, *branched]


def parallel_tools(tiny: SimpleNamespace) -> list[RecordedSession]:
    """All calls of a turn, and the first one only, which cuts the turn."""
    script = by_turn(BOTH, COPY, DONE)
    return [play(tiny, script, ReActOptions(parallel_tools=parallel))[1] for parallel in (True, False)]


def think_mode(tiny: SimpleNamespace) -> list[RecordedSession]:
    """Reasoning kept, stripped by the agent, and dropped by the template at the next question."""
    script = by_turn(thinking("look", shell("cat a.txt")), COPY, DONE)

    async def asks(client: Any, _: Any) -> None:
        agent = Agent(client, [])
        for question in ("q1", "q2", "q3"):
            await agent.step({"role": "user", "content": question})

    answers = {f"q{n}": f"<think>\nthought {n}\n</think>\n\nanswer {n}" for n in (1, 2, 3)}
    records = [play(tiny, script, ReActOptions(think=think), reasoning="inline")[1] for think in ("keep", "strip")]
    return [*records, run_session(tiny.backend(answers), asks)]


def sub_agents(tiny: SimpleNamespace) -> list[RecordedSession]:
    """Two sub-agents at the same time."""
    delegating = thinking("split", call("delegate", task="read a"), call("delegate", task="read b"))

    def script(prompt: str) -> str:
        turns = prompt.count("<|im_start|>assistant")
        for letter in "ab":
            if f"<|im_start|>user\nread {letter}<|im_end|>" in prompt:
                return [thinking("look", shell(f"cat {letter}.txt")), thinking("ok", f"read {letter}")][turns - 1]
        return [delegating, COPY, DONE][turns - 1]

    return [play(tiny, script, ReActOptions(sub_agents=True))[1]]


def compaction(tiny: SimpleNamespace) -> list[RecordedSession]:
    """A conversation that goes on from its own summary."""

    def script(prompt: str) -> str:
        return thinking("sum up", "far") if SUMMARISE in prompt else thinking("look", shell("cat a.txt"))

    return [play(tiny, script, ReActOptions(compact_after_tokens=10, max_turns=3))[1]]


def edits(tiny: SimpleNamespace) -> list[RecordedSession]:
    """A malformed turn in odd spelling that is dropped, a retry, two answers to one question, an edited turn."""
    broken = misspell(tiny.tokenizer, "<tool_call>\n{forest of segments\n</tool_call>")

    async def acts(client: Any, _: Any) -> None:
        agent = Agent(client, [{"role": "user", "content": "go"}])
        await agent.step()
        agent.messages.pop()
        await agent.step({"role": "user", "content": "format error"})
        agent.messages.pop()
        await agent.step()
        both = await client.chat.completions.create(messages=agent.messages, model="m", n=2, max_tokens=5)
        agent.messages[-1]["content"] = both.choices[1].message.content
        await agent.step({"role": "user", "content": "more"})

    answers = {"go": [*broken, tiny.tokenizer.eos_token_id], "format": "every unique token", "more": "the end"}
    return [run_session(tiny.backend(answers), acts)]


SCENARIOS: Sequence[Callable[[SimpleNamespace], list[RecordedSession]]] = (
    drift,
    parallel_tools,
    think_mode,
    sub_agents,
    compaction,
    edits,
)


def as_verl_stores_it(row: Row) -> engine_harness.Row:
    """A row as the engines' tests write it."""
    mask = list(row.response_mask)
    return engine_harness.Row(tokens=list(row.token_ids), prompt=len(row.prompt_ids), mask=mask)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_log_probs_of_the_rollout_are_the_engines(
    tiny: SimpleNamespace, engine: Any, scenario: Callable[[SimpleNamespace], list[RecordedSession]]
) -> None:
    rows = [row for record in scenario(tiny) for row in rows_of_calls(record.calls)]
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
