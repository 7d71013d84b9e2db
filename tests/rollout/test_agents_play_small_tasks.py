"""mini-swe-agent on small software tasks: all is real but the model, which is scripted.

The model plays the known repair, so the reward must be 1.0, and every token that it wrote must train.
"""

from collections.abc import Mapping
from typing import Any

import pytest
from gateway_harness import talking, trained_text
from played_tasks import ScriptedModel, mini_turn, play, task_of
from sandboxes_here import HERE
from small_swe import all_tasks, generator, writing
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.agents.in_environment import AgentInEnvironment, SessionLost
from tree_rl.rollout.agents.mini_swe import MiniSweAgent, MiniSweOptions
from tree_rl.rollout.transcript import rows_of_calls

FOUR = sorted(all_tasks())[:4]
LARGE = {"max_context_tokens": 20_000, "max_turn_tokens": 4000}
UNCONFINED = {"unconfined": HERE.unconfined}


def repair_for_mini(prompt: str) -> str:
    turns = prompt.count("<|im_start|>assistant")
    commands = ["ls && cat *.py", writing(dict(task_of(prompt).solution_files))]
    return mini_turn([*commands, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"][turns - 1])


def test_mini_swe_agent_solves_tasks_at_once(chatml: PreTrainedTokenizerFast) -> None:
    finished = play(ScriptedModel(chatml, repair_for_mini), [(MiniSweAgent(), all_tasks()[name]) for name in FOUR])
    for name, session in zip(FOUR, finished, strict=True):
        assert session.result == ("completed", 1.0) and not session.done.detail, name
        assert session.done.outcome.turns == len(session.record.calls) == 3
        (row,) = rows_of_calls(session.record.calls)
        written = [chatml.decode(call.response_ids) for call in session.record.calls]
        assert trained_text(chatml, row) == "".join(written)
        assert not session.record.drift.returned
        assert sorted(set(row.response_calls)) == [-1, 0, 1, 2]
    prompts = {session.record.calls[0].prompt_ids[:200] for session in finished}
    assert len(prompts) == 1, "what the prompt says of the machine is the same in every session"


def test_an_answer_that_mini_swe_agent_drops_is_a_branch_of_its_own(chatml: PreTrainedTokenizerFast) -> None:
    def script(prompt: str) -> str:
        return repair_for_mini(prompt) if "Format error" in prompt else "I forgot the block."

    (session,) = play(ScriptedModel(chatml, script), [(MiniSweAgent(), all_tasks()["lru_cache"])])
    assert session.result == ("completed", 1.0) and session.done.outcome.malformed_calls == 1
    dropped, kept = rows_of_calls(session.record.calls)
    assert trained_text(chatml, dropped) == "I forgot the block.<|im_end|>"
    assert "I forgot" not in chatml.decode(kept.token_ids)


def test_mini_swe_agent_stops_at_its_limits(chatml: PreTrainedTokenizerFast) -> None:
    task = all_tasks()["lru_cache"]
    backend = ScriptedModel(chatml, lambda prompt: mini_turn("echo again"))
    (turns,) = play(backend, [(MiniSweAgent(MiniSweOptions(max_turns=2)), task)])
    (calls,) = play(backend, [(MiniSweAgent(), task)], max_calls=3)
    (context,) = play(backend, [(MiniSweAgent(), task)], max_context_tokens=4200)
    assert turns.result == context.result == ("limit", 0.0) and calls.result == ("out_of_calls", 0.0)
    assert (len(turns.record.calls), len(calls.record.calls)) == (2, 3) and len(context.record.calls) > 3
    babble = play(ScriptedModel(chatml, lambda prompt: "no action"), [(MiniSweAgent(), task)])[0]
    assert babble.result == ("agent_failed", 0.0) and "several answers in a row" in babble.done.detail


async def test_the_agent_loops_agent_is_built_from_its_config(chatml: PreTrainedTokenizerFast) -> None:
    task = all_tasks()["lru_cache"]
    messages, row = generator().to_row(task, 0, "train")["prompt"], {"swe": task.to_row()}

    async def run(sent: Mapping[str, Any] = row, **options: Any) -> Any:
        async with talking(ScriptedModel(chatml, repair_for_mini), **LARGE) as talk:
            agent = AgentInEnvironment(agent="mini_swe", **options)
            return await agent.run(talk.endpoint, messages=messages, task=sent)

    limits = {"timeout_seconds": 20}
    result = await run(options={"max_turns": 5}, sandbox={"limits": limits, **UNCONFINED})
    assert (result.reward, result.status) == (1.0, "completed")
    assert (result.figures["turns"], result.figures["ended_completed"]) == (3.0, 1.0)
    assert (await run(options={"max_turns": 1}, sandbox=UNCONFINED)).figures["ended_limit"] == 1.0
    with pytest.raises(SessionLost, match="environment_failed: ValueError: extra_info: expected the key 'swe'"):
        await run({"nothing": 1}, sandbox=UNCONFINED)
