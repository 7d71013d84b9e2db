"""The native agent's switches, each with the exact rows it must leave; log-probs are checked against the model."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_harness import TinyModel, build_tokenizer, trained_edges
from protocol_turns import call, shell, thinking
from react_scripts import BOTH, COPY, DONE, as_tree_agent, by_turn, play

from tree_rl.rollout.agents import react
from tree_rl.rollout.agents.react import GO_ON, MALFORMED, MAX_RESULT_CHARACTERS, SUMMARISE, ReActOptions
from tree_rl.rollout.gateway.backend import BackendError
from tree_rl.rollout.gateway.protocols.exchange import ChatRequest, Completion
from tree_rl.rollout.gateway.session import CALL_TIMEOUT_S, Session
from tree_rl.rollout.transcript import rows_of_calls

END = "<|im_end|>"
LOOK = thinking("look", shell("cat a.txt"))


async def test_parallel_calls_all_run_and_the_session_is_one_row(tiny: SimpleNamespace) -> None:
    done, record, trained = await play(tiny, by_turn(BOTH, COPY, DONE))
    assert (done.status, done.reward, done.outcome.answer) == ("completed", 1.0, "done")
    assert trained == [BOTH + END + COPY + END + DONE + END]
    text = tiny.tokenizer.decode(record.calls[-1].prompt_ids)
    assert text.index("alpha\n</tool_response>") < text.index("beta\n</tool_response>")


async def test_its_client_waits_longer_than_the_gateway(tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    start, patience = Session.start_answer, []

    def noting(self: Session, request: ChatRequest) -> asyncio.Task[Completion]:
        patience.append(float(request.headers["x-stainless-read-timeout"]))
        return start(self, request)

    monkeypatch.setattr(Session, "start_answer", noting)
    await play(tiny, by_turn(COPY, DONE))
    assert len(patience) == 2 and min(patience) > CALL_TIMEOUT_S


async def test_one_call_at_a_time_cuts_the_turn_and_branches_there(tiny: SimpleNamespace) -> None:
    done, record, trained = await play(tiny, by_turn(BOTH, COPY, DONE), ReActOptions(parallel_tools=False))
    assert done.reward == 1.0
    assert "beta" not in tiny.tokenizer.decode(record.calls[-1].prompt_ids)
    # The first turn as generated is a branch of its own; the history keeps its first call only.
    assert trained == [BOTH + END, thinking("both", shell("cat a.txt")) + COPY + END + DONE + END]
    first, second = rows_of_calls(record.calls)
    shared = len(tiny.tokenizer.encode(thinking("both", shell("cat a.txt")), add_special_tokens=False))
    start = len(record.calls[0].prompt_ids)
    assert first.token_ids[: start + shared] == second.token_ids[: start + shared]


async def test_sub_agents_have_rows_of_their_own_under_their_names(tiny: SimpleNamespace) -> None:
    delegating = thinking("split", call("delegate", task="read a"), call("delegate", task="read b"))

    def script(prompt: str) -> str:
        turns = prompt.count("<|im_start|>assistant")
        for letter, word in (("a", "alpha"), ("b", "beta")):
            if f"<|im_start|>user\nread {letter}<|im_end|>" in prompt:
                return [thinking("look", shell(f"cat {letter}.txt")), thinking("ok", f"it says {word}")][turns - 1]
        return [delegating, COPY, DONE][turns - 1]

    done, record, trained = await play(tiny, script, ReActOptions(sub_agents=True))
    assert (done.status, done.reward) == ("completed", 1.0)
    by_agent = {name: [c for c in record.calls if c.agent == name] for name in ("main", "sub-1", "sub-2")}
    assert [len(calls) for calls in by_agent.values()] == [3, 2, 2]
    looked = [
        thinking("look", shell(f"cat {letter}.txt")) + END + thinking("ok", f"it says {word}") + END
        for letter, word in (("a", "alpha"), ("b", "beta"))
    ]
    assert sorted(trained) == sorted([delegating + END + COPY + END + DONE + END, *looked])
    main = tiny.tokenizer.decode(by_agent["main"][1].prompt_ids)
    assert main.index("it says alpha") < main.index("it says beta")
    assert "delegate" not in tiny.tokenizer.decode(by_agent["sub-1"][0].prompt_ids), "sub-agents have no sub-agents"


async def test_compaction_goes_on_from_the_models_own_summary(tiny: SimpleNamespace) -> None:
    summary = thinking("sum up", "a.txt says alpha")

    def script(prompt: str) -> str:
        if SUMMARISE in prompt:
            return summary
        if GO_ON.format(summary="a.txt says alpha") in prompt:
            return [COPY, DONE][prompt.count("<|im_start|>assistant") - 1]
        return LOOK

    done, record, trained = await play(tiny, script, ReActOptions(compact_after_tokens=10, max_turns=3))
    assert done.reward == 1.0
    # Compacted after the first turn, and once more after the second: the last call starts from a summary again.
    contexts = [tiny.tokenizer.decode(c.prompt_ids) for c in record.calls]
    assert [SUMMARISE in text for text in contexts] == [False, True, False, True, False]
    assert all("cat a.txt" not in text for text in contexts[2:])
    # A summary is asked for by a question, at which the template drops reasoning: each call is a row of its own.
    assert trained == [text + END for text in (LOOK, summary, COPY, summary, COPY)]


async def test_stripped_reasoning_makes_every_turn_a_branch_and_kept_reasoning_none(tiny: SimpleNamespace) -> None:
    script = by_turn(LOOK, COPY, DONE)
    done, _, trained = await play(tiny, script, ReActOptions(think="strip"), reasoning="inline")
    assert done.reward == 1.0
    assert trained == [LOOK + END, COPY + END, DONE + END]
    kept_done, _, kept = await play(tiny, script, ReActOptions(think="keep"), reasoning="inline")
    assert kept_done.reward == 1.0 and len(kept) == 1
    apart, _, _ = await play(tiny, script, ReActOptions(think="strip"))
    assert apart.status == "agent_failed" and "reasoning=inline" in apart.detail


async def test_limits_end_it_and_what_it_did_is_scored(tiny: SimpleNamespace) -> None:
    script = by_turn(COPY, *[thinking("again", shell("true"))] * 20)
    turns, record, _ = await play(tiny, script, ReActOptions(max_turns=2))
    assert (turns.status, turns.reward, turns.outcome.turns, len(record.calls)) == ("limit", 1.0, 2, 2)
    calls, record, _ = await play(tiny, script, ReActOptions(), max_calls=3)
    assert (calls.status, calls.reward, len(record.calls)) == ("out_of_calls", 1.0, 3)
    context, _, _ = await play(tiny, script, ReActOptions(), max_context_tokens=900)
    assert (context.status, context.reward) == ("limit", 1.0)
    short, record, _ = await play(tiny, script, ReActOptions(), max_turn_tokens=5)
    assert [len(call.response_ids) for call in record.calls] == [5] and not short.outcome.is_complete
    nothing, record, _ = await play(tiny, script, ReActOptions(), max_context_tokens=10)
    assert (nothing.status, record.calls) == ("limit", ())


async def test_reasoning_opened_by_the_template_is_stripped_with_it(tiny: SimpleNamespace) -> None:
    opens = "{%- if add_generation_prompt %}{{ '<think>\\n' }}{%- endif %}"
    tokenizer = build_tokenizer(tiny.tokenizer.chat_template + opens)
    first, second = "look\n</think>\n\n" + shell("cat a.txt"), "ok\n</think>\n\ndone"
    script = by_turn(first, second)
    backend = TinyModel(tiny.model, tokenizer, script)
    _, record, trained = await play(tiny, script, backend=backend, **as_tree_agent())
    assert trained == [first + END, second + END]
    prompt = tokenizer.decode(record.calls[1].prompt_ids)
    assert "look" not in prompt and shell("cat a.txt") in prompt


def branching(turn: str, first: str, second: str) -> Callable[[str], str]:
    """A turn that reads both files; then what is said to each result alone, and "both" to both of them."""
    ending = "user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    answers = {ending.format("alpha"): first, ending.format("beta"): second}

    def script(prompt: str) -> str:
        if prompt.count("<|im_start|>assistant") == 1:
            return turn
        return next((said for end, said in answers.items() if prompt.endswith(end)), "both")

    return script


async def test_parallel_branches_are_followed_up_alone_and_joined(tiny: SimpleNamespace) -> None:
    one, other = thinking("a", "first is alpha"), "second is beta"
    script = branching(BOTH, one, other)
    done, record, trained = await play(tiny, script, **as_tree_agent(parallel_tools="branches"))
    assert trained == [BOTH + END + one + END, BOTH + END + other + END, "both" + END]
    joined = tiny.tokenizer.decode(record.calls[-1].prompt_ids)
    assert joined.index("first is alpha") < joined.index("second is beta") and "<think>" not in joined
    assert done.outcome.answer == "both" and [one.turn for one in record.calls] == [0, 1, 1, 1]
    assert len(trained_edges(rows_of_calls(record.calls))) == sum(len(call.response_ids) for call in record.calls)


async def test_a_branch_that_says_nothing_leaves_the_result(tiny: SimpleNamespace) -> None:
    # The first branch acts instead of answering: its command runs. The second one never ends its reasoning.
    reads = shell("cat a.txt") + "\n" + shell("cat b.txt")
    script = branching(reads, shell("cp a.txt out.txt"), "<think>" + "on and on " * 60)
    done, record, trained = await play(tiny, script, **as_tree_agent(parallel_tools="branches", max_turn_tokens=120))
    assert (done.outcome.answer, done.reward, len(trained)) == ("both", 1.0, 3)
    joined = tiny.tokenizer.decode(record.calls[-1].prompt_ids)
    assert joined.index("\nalpha\n") < joined.index("\nbeta\n")


@pytest.mark.parametrize(
    ("asked", "said", "malformed"),
    [
        ('<tool_call>\n{"name": "shell", "arguments": {"command": "echo \\ud800"}}\n</tool_call>', MALFORMED, 1),
        ('<tool_call>\n{"name": "shell", "arguments": {broken}\n</tool_call>', MALFORMED, 1),
        (call("fly", command="echo ok"), "error: unknown tool 'fly'; the only tool is shell", 0),
        (call("shell", command="echo \0"), "[exit 126]", 0),
    ],
)
async def test_a_call_that_cannot_be_carried_out_is_answered_and_the_session_is_scored(
    tiny: SimpleNamespace, asked: str, said: str, malformed: int
) -> None:
    done, record, trained = await play(tiny, by_turn(asked, COPY, DONE))
    assert (done.status, done.reward, done.outcome.malformed_calls) == ("completed", 1.0, malformed), done
    assert said in tiny.tokenizer.decode(record.calls[1].prompt_ids)
    assert (trained, done.outcome.turns) == ([asked + END + COPY + END + DONE + END], 3)


@pytest.mark.parametrize(
    ("faults", "status", "turns", "refused"),
    [
        ([BackendError("busy", status=429, retry_after=0.1)], "completed", COPY + END + DONE + END, {429: 1}),
        ([BackendError("broken")] * 2, "agent_failed", COPY + END, {500: 2}),
    ],
)
async def test_a_server_that_fails_is_asked_again_and_what_was_done_is_scored(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, faults: Any, status: str, turns: str, refused: Any
) -> None:
    monkeypatch.setattr(react, "MAX_RETRIES", 1)
    left = list(faults)

    def script(prompt: str) -> str:
        turn = by_turn(COPY, DONE)(prompt)
        if turn == DONE and left:
            raise left.pop()
        return turn

    done, record, trained = await play(tiny, script)
    assert (done.status, done.reward) == (status, 1.0) and record.refused == refused
    assert trained == [turns]


async def test_long_results_are_cut_in_the_middle(tiny: SimpleNamespace) -> None:
    half = MAX_RESULT_CHARACTERS // 2
    command = "head -c 4000 /dev/zero | tr '\\0' a; head -c 4000 /dev/zero | tr '\\0' c"
    _, record, _ = await play(tiny, by_turn(shell(command), "ok"), max_context_tokens=9000)
    assert "\n" + "a" * half + "\n[...]\n" + "c" * half + "\n" in tiny.tokenizer.decode(record.calls[1].prompt_ids)
