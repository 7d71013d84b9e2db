"""A session with a scripted model: what it asks for, what runs, and which rows it leaves."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.chat import Chat
from tree_rl.rollout.environment import Outcome, ShellEnvironment, ToolCall
from tree_rl.rollout.session import MALFORMED, SessionOptions, SessionRecord, run_session
from tree_rl.rollout.tool_calls import parse_turn
from tree_rl.rollout.transcript import rows_of_calls

SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' + tools[0].function.name + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' + (opening or '') }}{%- endif %}"""
PROMPT = "<|im_start|>system\nshell<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"


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

    async def __call__(self, prompt_ids: list[int], *, max_tokens: int) -> tuple[list[int], list[float]]:
        prompt = self.tokenizer.decode(prompt_ids)
        assert prompt in self.answers, f"unexpected prompt:\n{prompt}"
        ids = self.tokenizer.encode(self.answers[prompt] + "<|im_end|>", add_special_tokens=False)[:max_tokens]
        return ids, [-0.5] * len(ids)


def run(
    tokenizer: PreTrainedTokenizerFast,
    answers: Mapping[str, str],
    *,
    task: Mapping[str, Any] | None = None,
    template_options: Mapping[str, Any] | None = None,
    environment: Any = None,
    **options: Any,
) -> SessionRecord:
    return asyncio.run(
        run_session(
            messages=[{"role": "user", "content": "go"}],
            task=task or {"files": {"k.txt": "seven"}, "check": "grep -q seven out.txt"},
            chat=Chat(tokenizer, template_options),
            environment=environment or ShellEnvironment(),
            generate=Scripted(tokenizer, answers),
            options=SessionOptions(**options),
        )
    )


def texts(tokenizer: PreTrainedTokenizerFast, record: SessionRecord) -> list[str]:
    return [tokenizer.decode(row.token_ids) for row in rows_of_calls(record.calls)]


def trained_texts(tokenizer: PreTrainedTokenizerFast, record: SessionRecord) -> list[str]:
    return [
        tokenizer.decode([t for t, m in zip(row.response_ids, row.response_mask, strict=True) if m])
        for row in rows_of_calls(record.calls)
    ]


def test_with_reasoning_kept_a_session_is_one_row_and_the_tools_really_ran(tokenizer: PreTrainedTokenizerFast) -> None:
    first = "<think>look</think>\n" + shell("cat k.txt")
    second = "<think>save</think>\n" + shell("cp k.txt out.txt")
    p2 = PROMPT + first + "<|im_end|>" + observation("seven")
    p3 = p2 + second + "<|im_end|>" + observation("")
    record = run(tokenizer, {PROMPT: first, p2: second, p3: "done"}, strip_reasoning=False)
    assert texts(tokenizer, record) == [p3 + "done<|im_end|>"]
    assert trained_texts(tokenizer, record) == [first + "<|im_end|>" + second + "<|im_end|>done<|im_end|>"]
    assert record.reward == 1.0 and record.tool_calls == 2
    assert record.outcome == Outcome(answer="done", turns=3, malformed_calls=0, is_complete=True)


def test_stripped_reasoning_makes_every_turn_a_branch_that_trains_its_own_turn(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    first, second = "<think>look</think>\n\n" + shell("cat k.txt"), "<think>hm</think>\nit is seven"
    p2 = PROMPT + shell("cat k.txt") + "<|im_end|>" + observation("seven")
    record = run(tokenizer, {PROMPT: first, p2: second}, strip_reasoning=True)
    assert texts(tokenizer, record) == [PROMPT + first + "<|im_end|>", p2 + second + "<|im_end|>"]
    assert trained_texts(tokenizer, record) == [first + "<|im_end|>", second + "<|im_end|>"]
    assert record.outcome.answer == "it is seven" and record.reward == 0.0


def test_a_turn_without_reasoning_does_not_branch(tokenizer: PreTrainedTokenizerFast) -> None:
    p2 = PROMPT + shell("cat k.txt") + "<|im_end|>" + observation("seven")
    record = run(tokenizer, {PROMPT: shell("cat k.txt"), p2: "seven"}, strip_reasoning=True)
    assert len(texts(tokenizer, record)) == 1


def test_reasoning_opened_by_the_template_is_stripped_with_it(tokenizer: PreTrainedTokenizerFast) -> None:
    opening = {"opening": "<think>\n"}
    first = "look</think>\n" + shell("cat k.txt")
    p2 = PROMPT + shell("cat k.txt") + "<|im_end|>" + observation("seven") + "<think>\n"
    record = run(tokenizer, {PROMPT + "<think>\n": first, p2: "ok</think>seven"}, template_options=opening)
    assert trained_texts(tokenizer, record) == [first + "<|im_end|>", "ok</think>seven<|im_end|>"]


def test_parallel_calls_in_a_turn_run_together_and_answer_in_order(tokenizer: PreTrainedTokenizerFast) -> None:
    first = shell("sleep 0.2; echo slow") + "\n" + shell("echo fast") + "\n" + shell("echo dropped")
    p2 = PROMPT + first + "<|im_end|>" + observation("slow", "fast")
    record = run(tokenizer, {PROMPT: first, p2: "ok"}, max_parallel_calls=2)
    assert len(texts(tokenizer, record)) == 1 and record.tool_calls == 2
    single = PROMPT + first + "<|im_end|>" + observation("slow")
    assert run(tokenizer, {PROMPT: first, single: "ok"}, parallel_tools="single").tool_calls == 1


def test_parallel_branches_are_followed_up_alone_and_joined(tokenizer: PreTrainedTokenizerFast) -> None:
    first = "<think>both</think>\n" + shell("echo one") + "\n" + shell("echo two")
    branch = PROMPT + first + "<|im_end|>"
    stripped = PROMPT + shell("echo one") + "\n" + shell("echo two") + "<|im_end|>"
    answers = {
        PROMPT: first,
        branch + observation("one"): "<think>a</think>first is one",
        branch + observation("two"): "second is two",
        stripped + observation("first is one", "second is two"): "both",
    }
    record = run(tokenizer, answers, parallel_tools="branches")
    assert trained_texts(tokenizer, record) == [
        first + "<|im_end|><think>a</think>first is one<|im_end|>",
        first + "<|im_end|>second is two<|im_end|>",
        "both<|im_end|>",
    ]
    assert record.outcome.answer == "both"
    once = rows_of_calls(record.calls, shared="first_row")
    generated = sum(len(call.response_ids) for call in record.calls)
    assert sum(sum(row.response_mask) for row in once) == generated


def test_malformed_and_unknown_calls_are_answered_in_words(tokenizer: PreTrainedTokenizerFast) -> None:
    first = "<tool_call>{broken</tool_call>" + shell("echo ok").replace('"shell"', '"fly"')
    unknown = "error: unknown tool 'fly'; the only tool is shell"
    p2 = PROMPT + first + "<|im_end|>" + observation(MALFORMED, unknown)
    record = run(tokenizer, {PROMPT: first, p2: "sorry"})
    assert record.outcome.malformed_calls == 1 and record.outcome.is_complete


def test_limits_end_a_session_without_losing_it(tokenizer: PreTrainedTokenizerFast) -> None:
    p2 = PROMPT + shell("true") + "<|im_end|>" + observation("")
    answers = {PROMPT: shell("true"), p2: shell("true")}
    turns = run(tokenizer, answers, max_turns=2)
    assert (turns.outcome.turns, turns.outcome.is_complete) == (2, False)
    short = run(tokenizer, answers, max_turn_tokens=5)
    assert [len(call.response_ids) for call in short.calls] == [5] and not short.outcome.is_complete
    narrow = run(tokenizer, answers, max_response_tokens=90)
    (row,) = rows_of_calls(narrow.calls)
    assert len(row.response_ids) <= 90
    with pytest.raises(ValueError, match="max_prompt_tokens=10"):
        run(tokenizer, answers, max_prompt_tokens=10)


def test_long_results_are_cut_in_the_middle(tokenizer: PreTrainedTokenizerFast) -> None:
    first = shell("printf aaaabbbbbbbbcccc")
    p2 = PROMPT + first + "<|im_end|>" + observation("aaaa\n[...]\ncccc")
    assert run(tokenizer, {PROMPT: first, p2: "ok"}, max_result_tokens=8).outcome.is_complete


def test_the_environment_is_closed_whatever_happens(tokenizer: PreTrainedTokenizerFast) -> None:
    class Failing(ShellEnvironment):
        closed = 0

        async def call(self, call: ToolCall) -> str:
            raise OSError("tool broke")

        async def close(self) -> None:
            await super().close()
            Failing.closed += 1

    with pytest.raises(OSError, match="tool broke"):
        run(tokenizer, {PROMPT: shell("true")}, environment=Failing())
    assert Failing.closed == 1


def test_a_tokenizer_with_another_end_token_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    class Other:
        eos_token, eos_token_id = "<|endoftext|>", 99

        def apply_chat_template(self, conversation: Sequence[Any], **kwargs: Any) -> str:
            return tokenizer.apply_chat_template(conversation, **kwargs)

        def encode(self, text: str, **kwargs: Any) -> list[int]:
            return tokenizer.encode(text, **kwargs)

        def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
            return tokenizer.decode(token_ids, **kwargs)

    with pytest.raises(ValueError, match="set eos_token"):
        Chat(Other())


@pytest.mark.parametrize(
    ("content", "text", "calls"),
    [
        ("plain", "plain", []),
        ("<think><tool_call>{}</tool_call></think>hi", "hi", []),
        ("<think>never closed <tool_call>{}</tool_call>", "", []),
        ('a<tool_call>{"name": "x"}</tool_call>b', "ab", [ToolCall(name="x", arguments={})]),
        ('<tool_call>{"name": 3}</tool_call><tool_call>[]</tool_call><tool_call>', "<tool_call>", [None, None]),
        ('<tool_call>{"name": "x", "arguments": "y"}</tool_call>', "", [None]),
    ],
)
def test_turns_are_read(content: str, text: str, calls: list[ToolCall | None]) -> None:
    turn = parse_turn(content)
    assert (turn.text, list(turn.calls)) == (text, calls)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="parallel_tools='many'"):
        SessionOptions(parallel_tools="many")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_turns=0"):
        SessionOptions(max_turns=0)
