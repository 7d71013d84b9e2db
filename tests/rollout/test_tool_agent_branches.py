"""`custom.tree_agent` with a scripted model: what it asks for, what runs, and which rows it leaves."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from gateway_harness import trained_text
from sandboxes_here import HERE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.agents import react
from tree_rl.rollout.agents.in_environment import FinishedTask, run_task
from tree_rl.rollout.agents.react import MALFORMED, MAX_RESULT_CHARACTERS, ReActAgent, ReActOptions
from tree_rl.rollout.environments import Outcome, ShellEnvironment, ToolCall
from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.transcript import ModelCall, Row, rows_of_calls
from tree_rl.verl_plugin.agent_loops.tool_agent_loop import as_gateway_agent

SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' + tools[0].function.name + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}{{- '<tool_call>\\n{"name": "' + call.function.name }}
            {{- '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' + (opening or '') }}{%- endif %}"""
PROMPT = "<|im_start|>system\nshell<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>"


def observation(*results: str) -> str:
    body = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in results)
    return f"\n<|im_start|>user{body}<|im_end|>\n<|im_start|>assistant\n"


def shell(command: str) -> str:
    return f'<tool_call>\n{{"name": "shell", "arguments": {{"command": "{command}"}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


class Scripted:
    """A model that answers each prompt by its text, and fails on a prompt nobody scripted."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, answers: Mapping[str, str]) -> None:
        self.tokenizer = tokenizer
        self.answers = answers

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        prompt = self.tokenizer.decode(list(prompt_ids))
        assert prompt in self.answers, f"unexpected prompt:\n{prompt}"
        ids = self.tokenizer.encode(self.answers[prompt] + END, add_special_tokens=False)[:max_tokens]
        reason = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
        return Generation(token_ids=tuple(ids), log_probs=(-0.5,) * len(ids), finish_reason=reason)


@dataclass(frozen=True, kw_only=True)
class Played:
    done: FinishedTask
    calls: tuple[ModelCall, ...]
    tokenizer: PreTrainedTokenizerFast

    @property
    def rows(self) -> list[Row]:
        return rows_of_calls(self.calls)

    @property
    def texts(self) -> list[str]:
        return [self.tokenizer.decode(row.token_ids) for row in self.rows]

    @property
    def trained(self) -> list[str]:
        return [trained_text(self.tokenizer, row) for row in self.rows]


def run(
    tokenizer: PreTrainedTokenizerFast,
    answers: Mapping[str, str],
    *,
    template_options: Mapping[str, Any] | None = None,
    environment: Any = None,
    max_context_tokens: int = 4096,
    **options: Any,
) -> Played:
    """Play what `custom.tree_agent` with these options plays."""
    config = as_gateway_agent(options)
    gateway_options = GatewayOptions(
        max_context_tokens=max_context_tokens,
        max_turn_tokens=config["gateway"]["max_turn_tokens"] or max_context_tokens,
        reasoning=config["gateway"]["reasoning"],
        template_options=dict(template_options or {}),
    )

    async def play() -> Played:
        backend = Scripted(tokenizer, answers)
        async with Gateway(tokenizer=tokenizer, backend=backend, options=gateway_options) as gateway:
            session = gateway.open_session()
            done = await run_task(
                agent=ReActAgent(ReActOptions(**config["agent_options"]["options"])),
                environment=environment or ShellEnvironment(HERE),
                endpoint=gateway.endpoint(session),
                task={"files": {"k.txt": "seven"}, "check": "grep -q seven out.txt"},
                messages=[{"role": "user", "content": "go"}],
                timeout_seconds=60,
            )
            record = await gateway.close_session(session)
        return Played(done=done, calls=record.calls, tokenizer=tokenizer)

    return asyncio.run(play())


@pytest.fixture(autouse=True)
def few_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions with faults end soon."""
    monkeypatch.setattr(react, "MAX_RETRIES", 0)


def test_with_reasoning_kept_a_session_is_one_row_and_the_tools_really_ran(tokenizer: PreTrainedTokenizerFast) -> None:
    first = "<think>look</think>\n" + shell("cat k.txt")
    second = "<think>save</think>\n" + shell("cp k.txt out.txt")
    p2 = PROMPT + first + END + observation("seven")
    p3 = p2 + second + END + observation("")
    played = run(tokenizer, {PROMPT: first, p2: second, p3: "done"}, strip_reasoning=False)
    assert played.texts == [p3 + "done" + END]
    assert played.trained == [first + END + second + END + "done" + END]
    assert played.done.reward == 1.0
    assert played.done.outcome == Outcome(answer="done", turns=3, malformed_calls=0, is_complete=True)


def test_stripped_reasoning_makes_every_turn_a_branch_that_trains_its_own_turn(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    first, second = "<think>look</think>\n\n" + shell("cat k.txt"), "<think>hm</think>\nit is seven"
    p2 = PROMPT + shell("cat k.txt") + END + observation("seven")
    played = run(tokenizer, {PROMPT: first, p2: second}, strip_reasoning=True)
    assert played.texts == [PROMPT + first + END, p2 + second + END]
    assert played.trained == [first + END, second + END]
    assert played.done.outcome.answer == "it is seven" and played.done.reward == 0.0


def test_a_turn_without_reasoning_does_not_branch(tokenizer: PreTrainedTokenizerFast) -> None:
    p2 = PROMPT + shell("cat k.txt") + END + observation("seven")
    assert len(run(tokenizer, {PROMPT: shell("cat k.txt"), p2: "seven"}).rows) == 1


def test_reasoning_opened_by_the_template_is_stripped_with_it(tokenizer: PreTrainedTokenizerFast) -> None:
    first = "look</think>\n" + shell("cat k.txt")
    p2 = PROMPT + shell("cat k.txt") + END + observation("seven") + "<think>\n"
    answers = {PROMPT + "<think>\n": first, p2: "ok</think>seven"}
    played = run(tokenizer, answers, template_options={"opening": "<think>\n"})
    assert played.trained == [first + END, "ok</think>seven" + END]


def test_parallel_branches_are_followed_up_alone_and_joined(tokenizer: PreTrainedTokenizerFast) -> None:
    first = "<think>both</think>\n" + shell("echo one") + "\n" + shell("echo two")
    branch = PROMPT + first + END
    stripped = PROMPT + shell("echo one") + "\n" + shell("echo two") + END
    answers = {
        PROMPT: first,
        branch + observation("one"): "<think>a</think>first is one",
        branch + observation("two"): "second is two",
        stripped + observation("first is one", "second is two"): "both",
    }
    played = run(tokenizer, answers, parallel_tools="branches")
    assert played.trained == [
        first + END + "<think>a</think>first is one" + END,
        first + END + "second is two" + END,
        "both" + END,
    ]
    assert played.done.outcome.answer == "both"
    once = rows_of_calls(played.calls, shared="first_row")
    generated = sum(len(call.response_ids) for call in played.calls)
    assert sum(sum(row.response_mask) for row in once) == generated


def test_a_branch_that_says_nothing_leaves_the_result(tokenizer: PreTrainedTokenizerFast) -> None:
    first = shell("echo one") + "\n" + shell("echo two")
    turn = PROMPT + first + END
    # The first branch acts instead of answering: its command runs. The second one never ends its reasoning.
    answers = {
        PROMPT: first,
        turn + observation("one"): shell("cp k.txt out.txt"),
        turn + observation("two"): "<think>" + "on and on " * 20,
        turn + observation("one", "two"): "both",
    }
    played = run(tokenizer, answers, parallel_tools="branches", max_turn_tokens=180)
    assert (played.done.outcome.answer, played.done.reward, len(played.rows)) == ("both", 1.0, 3)


@pytest.mark.parametrize(
    "arguments",
    [
        r'{"command": "echo \ud800"}',
        r'{"\udfff": 1}',
        f'{{"command": {"9" * 5000}}}',
        f'{{"command": {"[" * 3000}{"]" * 3000}}}',
        '{"command": 1e999}',
        '{"command": NaN}',
    ],
)
def test_a_call_that_nobody_could_carry_is_answered_and_the_session_is_scored(
    tokenizer: PreTrainedTokenizerFast, arguments: str
) -> None:
    first = f'<tool_call>\n{{"name": "shell", "arguments": {arguments}}}\n</tool_call>'
    p2 = PROMPT + first + END + f"\n<|im_start|>user\n{MALFORMED}<|im_end|>\n<|im_start|>assistant\n"
    p3 = p2 + shell("cp k.txt out.txt") + END + observation("")
    played = run(tokenizer, {PROMPT: first, p2: shell("cp k.txt out.txt"), p3: "done"}, max_context_tokens=20_000)
    assert (played.done.status, played.done.reward) == ("completed", 1.0), played.done
    assert played.done.outcome.malformed_calls == 1 and len(played.calls) == 3


def test_a_command_that_no_shell_reads_is_answered_and_the_session_is_scored(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    class Answering(ShellEnvironment):
        answers: ClassVar[list[str]] = []

        async def call(self, call: ToolCall) -> str:
            Answering.answers.append(await super().call(call))
            return "answered"

    first = shell(r"echo \u0000")
    p2 = PROMPT + first + END + observation("answered")
    played = run(tokenizer, {PROMPT: first, p2: "done"}, environment=Answering(HERE))
    assert (played.done.status, played.done.reward) == ("completed", 0.0), played.done
    assert Answering.answers and "[exit 126]" in Answering.answers[0]


def test_a_malformed_call_is_answered_in_words(tokenizer: PreTrainedTokenizerFast) -> None:
    first = "<tool_call>{broken</tool_call>"
    p2 = PROMPT + first + END + f"\n<|im_start|>user\n{MALFORMED}<|im_end|>\n<|im_start|>assistant\n"
    unknown = shell("echo ok").replace('"shell"', '"fly"')
    p3 = p2 + unknown + END + observation("error: unknown tool 'fly'; the only tool is shell")
    played = run(tokenizer, {PROMPT: first, p2: unknown, p3: "sorry"})
    assert played.done.outcome == Outcome(answer="sorry", turns=3, malformed_calls=1, is_complete=True)
    assert len(played.rows) == 1


def test_limits_end_a_session_without_losing_it(tokenizer: PreTrainedTokenizerFast) -> None:
    p2 = PROMPT + shell("true") + END + observation("")
    answers = {PROMPT: shell("true"), p2: shell("true")}
    turns = run(tokenizer, answers, max_turns=2)
    assert (turns.done.outcome.turns, turns.done.outcome.is_complete, turns.done.status) == (2, False, "limit")
    short = run(tokenizer, answers, max_turn_tokens=5)
    assert [len(call.response_ids) for call in short.calls] == [5] and not short.done.outcome.is_complete
    room = len(tokenizer.encode(PROMPT, add_special_tokens=False)) + 90
    (row,) = run(tokenizer, answers, max_context_tokens=room).rows
    assert len(row.response_ids) <= 90
    nothing = run(tokenizer, answers, max_context_tokens=10)
    assert (nothing.done.status, nothing.rows) == ("limit", [])


def test_long_results_are_cut_in_the_middle(tokenizer: PreTrainedTokenizerFast) -> None:
    half = MAX_RESULT_CHARACTERS // 2
    first = shell("head -c 4000 /dev/zero | tr '\\\\0' a; head -c 4000 /dev/zero | tr '\\\\0' c")
    p2 = PROMPT + first + END + observation("a" * half + "\n[...]\n" + "c" * half)
    assert run(tokenizer, {PROMPT: first, p2: "ok"}, max_context_tokens=9000).done.outcome.is_complete


def test_the_environment_is_closed_whatever_happens(tokenizer: PreTrainedTokenizerFast) -> None:
    class Failing(ShellEnvironment):
        closed = 0

        async def call(self, call: ToolCall) -> str:
            raise OSError("tool broke")

        async def close(self) -> None:
            await super().close()
            Failing.closed += 1

    played = run(tokenizer, {PROMPT: shell("true")}, environment=Failing(HERE))
    assert (played.done.status, played.done.reward, Failing.closed) == ("agent_failed", 0.0, 1)
    assert "tool broke" in played.done.detail
