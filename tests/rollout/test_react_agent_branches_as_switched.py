"""The native agent's switches, each with the exact rows it must leave; log-probs are checked against the model."""

from types import SimpleNamespace

import pytest
from react_scripts import BOTH, COPY, DONE, by_turn, call, play, shell, thinking

from tree_rl.rollout.agents.react import GO_ON, SUMMARISE, ReActOptions
from tree_rl.rollout.transcript import rows_of_calls

END = "<|im_end|>"


def test_parallel_calls_all_run_and_the_session_is_one_row(tiny: SimpleNamespace) -> None:
    done, record, trained = play(tiny, by_turn(BOTH, COPY, DONE), ReActOptions())
    assert (done.status, done.reward, done.outcome.answer) == ("completed", 1.0, "done")
    assert trained == [BOTH + END + COPY + END + DONE + END]
    text = tiny.tokenizer.decode(record.calls[-1].prompt_ids)
    assert text.index("alpha\n</tool_response>") < text.index("beta\n</tool_response>")


def test_one_call_at_a_time_cuts_the_turn_and_branches_there(tiny: SimpleNamespace) -> None:
    done, record, trained = play(tiny, by_turn(BOTH, COPY, DONE), ReActOptions(parallel_tools=False))
    assert done.reward == 1.0
    assert "beta" not in tiny.tokenizer.decode(record.calls[-1].prompt_ids)
    # The first turn as generated is a branch of its own; the history keeps its first call only.
    assert trained == [BOTH + END, thinking("both", shell("cat a.txt")) + COPY + END + DONE + END]
    first, second = rows_of_calls(record.calls)
    shared = len(tiny.tokenizer.encode(thinking("both", shell("cat a.txt")), add_special_tokens=False))
    start = len(record.calls[0].prompt_ids)
    assert first.token_ids[: start + shared] == second.token_ids[: start + shared]


def test_sub_agents_have_rows_of_their_own_under_their_names(tiny: SimpleNamespace) -> None:
    delegating = thinking("split", call("delegate", task="read a"), call("delegate", task="read b"))

    def script(prompt: str) -> str:
        turns = prompt.count("<|im_start|>assistant")
        for letter, word in (("a", "alpha"), ("b", "beta")):
            if f"<|im_start|>user\nread {letter}<|im_end|>" in prompt:
                return [thinking("look", shell(f"cat {letter}.txt")), thinking("ok", f"it says {word}")][turns - 1]
        return [delegating, COPY, DONE][turns - 1]

    done, record, trained = play(tiny, script, ReActOptions(sub_agents=True))
    assert (done.status, done.reward) == ("completed", 1.0)
    by_agent = {name: [c for c in record.calls if c.agent == name] for name in ("main", "sub-1", "sub-2")}
    assert [len(calls) for calls in by_agent.values()] == [3, 2, 2]
    assert sorted(trained) == sorted(
        [
            delegating + END + COPY + END + DONE + END,
            *(
                thinking("look", shell(f"cat {letter}.txt")) + END + thinking("ok", f"it says {word}") + END
                for letter, word in (("a", "alpha"), ("b", "beta"))
            ),
        ]
    )
    main = tiny.tokenizer.decode(by_agent["main"][1].prompt_ids)
    assert main.index("it says alpha") < main.index("it says beta")
    assert "delegate" not in tiny.tokenizer.decode(by_agent["sub-1"][0].prompt_ids), "sub-agents have no sub-agents"


def test_compaction_goes_on_from_the_models_own_summary(tiny: SimpleNamespace) -> None:
    summary = thinking("sum up", "a.txt says alpha")

    def script(prompt: str) -> str:
        if SUMMARISE in prompt:
            return summary
        if GO_ON.format(summary="a.txt says alpha") in prompt:
            return [COPY, DONE][prompt.count("<|im_start|>assistant") - 1]
        return thinking("look", shell("cat a.txt"))

    done, record, trained = play(tiny, script, ReActOptions(compact_after_tokens=10, max_turns=3))
    assert done.reward == 1.0
    # Compacted after the first turn, and once more after the second: the last call starts from a summary again.
    contexts = [tiny.tokenizer.decode(c.prompt_ids) for c in record.calls]
    assert [SUMMARISE in text for text in contexts] == [False, True, False, True, False]
    assert all("cat a.txt" not in text for text in contexts[2:])
    # A summary is asked for by a question, at which the template drops reasoning: each call is a row of its own.
    look = thinking("look", shell("cat a.txt"))
    assert trained == [text + END for text in (look, summary, COPY, summary, COPY)]


def test_stripped_reasoning_makes_every_turn_a_branch_and_kept_reasoning_none(tiny: SimpleNamespace) -> None:
    script = by_turn(thinking("look", shell("cat a.txt")), COPY, DONE)
    done, _, trained = play(tiny, script, ReActOptions(think="strip"), reasoning="inline")
    assert done.reward == 1.0
    assert trained == [thinking("look", shell("cat a.txt")) + END, COPY + END, DONE + END]
    kept_done, _, kept = play(tiny, script, ReActOptions(think="keep"), reasoning="inline")
    assert kept_done.reward == 1.0 and len(kept) == 1


def test_stripping_needs_the_reasoning_inside_the_text(tiny: SimpleNamespace) -> None:
    done, _, _ = play(tiny, by_turn(COPY, DONE), ReActOptions(think="strip"))
    assert done.status == "agent_failed" and "reasoning=inline" in done.detail


def test_limits_end_it_and_what_it_did_is_scored(tiny: SimpleNamespace) -> None:
    script = by_turn(COPY, *[thinking("again", shell("true"))] * 20)
    turns, record, _ = play(tiny, script, ReActOptions(max_turns=2))
    assert (turns.status, turns.reward, turns.outcome.turns, len(record.calls)) == ("limit", 1.0, 2, 2)
    calls, record, _ = play(tiny, script, ReActOptions(), max_calls=3)
    assert (calls.status, calls.reward, len(record.calls)) == ("out_of_calls", 1.0, 3)
    context, _, _ = play(tiny, script, ReActOptions(), max_context_tokens=900)
    assert (context.status, context.reward) == ("limit", 1.0)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="think='hide'"):
        ReActOptions(think="hide")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_turns=0"):
        ReActOptions(max_turns=0)
