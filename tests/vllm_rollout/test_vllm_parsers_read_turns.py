"""The tool parsers of vLLM, chosen as a dialect, read the turns that our own dialects read, and as these do."""

from collections.abc import Callable
from typing import Any

import pytest
from dialect_writers import MARKUP, WRITERS, tools_for
from gateway_harness import build_tokenizer

from tree_rl.rollout.gateway.dialects.dialect import Dialect
from tree_rl.rollout.gateway.dialects.families import DIALECTS, dialect_named

pytestmark = pytest.mark.vllm

PARSERS = {
    "hermes": ("hermes",),
    "qwen3_coder": ("qwen3_coder", "qwen3_xml"),
    "glm4": ("glm45", "glm47"),
    "kimi_k2": ("kimi_k2",),
    "deepseek_v3": ("deepseek_v3",),
    "deepseek_v3_1": ("deepseek_v31",),
    "mistral": ("mistral",),
    "llama3": ("llama3_json",),
}
"""How calls are written -> the parsers that read them."""
CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "one": [("shell", {"command": "ls -la"})],
    "two": [("shell", {"command": "ls"}), ("read", {"path": "a.py", "lines": 3})],
    "no arguments": [("shell", {})],
    "types": [("edit", {"count": 5, "deep": {"a": [1, None, "x"]}, "exact": True, "share": 0.5, "text": "5"})],
    "lines": [("write", {"text": "def f():\n    return 'a \"b\"'\n", "path": "ü/中.py"})],
}
DIFFERENT = {"mistral_list": ("mistral", "the whole list as the name and arguments of one call")}
"""How calls are written -> the parser that reads them otherwise, and how. Our own dialect reads them."""


@pytest.fixture(scope="module")
def named() -> Callable[[str], Dialect]:
    """A parser of vLLM, for a tokenizer with the control tokens that parsers look up."""
    made = build_tokenizer()
    marks = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_argument_begin|>")
    deep = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>")
    made.add_tokens([*MARKUP, *marks, *deep, "</arg_key>", "</arg_value>"])
    return lambda name: dialect_named(f"vllm:{name}", template=made.chat_template, tokenizer=made)


READ = [(form, parser, case, True) for form, names in PARSERS.items() for parser in names for case in CASES]


@pytest.mark.parametrize(
    ("form", "parser", "case", "is_alike"),
    [*READ, *((form, parser, "one", False) for form, (parser, _) in DIFFERENT.items())],
)
def test_vllm_reads_what_we_read_or_is_named(
    named: Callable[[str], Dialect], form: str, parser: str, case: str, is_alike: bool
) -> None:
    (name, write), calls = WRITERS[form], CASES[case]
    given = {"tools": tools_for(calls), "is_reasoning_open": False}
    ours, theirs = (dialect.read(write(calls), **given) for dialect in (DIALECTS[name](), named(parser)))
    assert [(call.name, call.arguments) for call in ours.calls] == calls
    assert ([(call.name, call.arguments) for call in theirs.calls] == calls) == is_alike
    assert not is_alike or theirs.content.strip() == ours.content.strip() == ""


@pytest.mark.parametrize("form", PARSERS)
def test_a_cut_turn_never_raises(named: Callable[[str], Dialect], form: str) -> None:
    calls, engine = CASES["two"], named(PARSERS[form][0])
    turn = WRITERS[form][1](calls)
    for end in range(0, len(turn), 5):
        # Some parsers hand over what there is of a call, even half a name; ours wait for its end.
        read = engine.read(turn[:end], tools=tools_for(calls), is_reasoning_open=False)
        assert len(read.calls) <= 2


def test_parsers_that_read_no_text_are_refused_at_the_start(named: Callable[[str], Dialect]) -> None:
    with pytest.raises(ValueError, match=r"dialect='vllm:openai': this parser cannot read this model's turns"):
        named("openai")
    with pytest.raises(ValueError, match=r"dialect='vllm:nothing': this vLLM has no such tool parser"):
        named("nothing")
