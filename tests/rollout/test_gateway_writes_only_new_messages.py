"""A template that recalls what it wrote for earlier messages writes what transformers writes for all of them."""

import json
from typing import Any

import pytest
from gateway_harness import CHATML, build_tokenizer
from hostile_conversations import EDITS, conversations
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from tree_rl.rollout.gateway import openai_api
from tree_rl.rollout.gateway.chat_template import ChatTemplate
from tree_rl.rollout.gateway.messages import ChatMessage
from tree_rl.rollout.gateway.request_memory import RequestMemory
from tree_rl.rollout.gateway.template_memory import NotPureError, TemplateMemory, outer_loops, read_by_loop

LOOPS = {
    "qwen3": None,
    "chatml": CHATML,
    "first message": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}[system]{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "a part of the list": (
        "{% set rest = messages %}{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% endif %}"
        "{% for m in rest %}{{ loop.index }}{{ m.role }}{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    ),
    "neighbours": (
        "{% for m in messages %}{{ m.role }}{% if not loop.last %}>{{ messages[loop.index0 + 1].role }}{% endif %}"
        "{{ messages[loop.index0 - 2].content }}{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}"
    ),
    "the last message": "{% for m in messages %}{{ m.content }}{{ messages[-1].role }}|{% endfor %}",
    "length": "{% for m in messages %}{{ m.content }}{{ messages | length }}|{% endfor %}",
    "length of the loop": "{% for m in messages %}{{ m.content }}{{ loop.revindex }}|{% endfor %}",
    "the loop itself": "{% for m in messages %}{% set l = loop %}{{ m.content }}{{ l.revindex }}|{% endfor %}",
    "two ahead": "{% for m in messages %}{{ m.content }}{{ (messages[loop.index0 + 2] or {}).content }}|{% endfor %}",
    "cycler": "{% set c = cycler('a', 'b') %}{% for m in messages %}{{ c.next() }}{% endfor %}{{ c.next() }}",
    "joiner": "{% set j = joiner(',') %}{% for m in messages %}{{ j() }}{{ m.content }}{% endfor %}",
    "random": "{% for m in messages %}{{ m.content }}{{ [m.role] | random }}{% endfor %}",
    "next": "{% for m in messages %}{{ m.content }}{{ (loop.nextitem or {}).role }}|{% endfor %}",
    "changed": "{% for m in messages %}{% if loop.changed(m.role) %}*{% endif %}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "state": (
        "{% set ns = namespace(seen=0) %}"
        "{% for m in messages %}{% set ns.seen = ns.seen + 1 %}{{ ns.seen }}{% endfor %}"
        "{% for m in messages %}{{ ns.seen }}{{ m.content }}{% endfor %}"
    ),
    "macro": (
        "{% set ns = namespace(n=0) %}"
        "{% macro say(m) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m.content }}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}{% for m in messages %}{{ m.role ~ tools }}{% endfor %}"
    ),
    "a name of one's own": (
        "{% set x = messages | length %}{% for m in messages %}{{ x }}{% set x = m.content %}{{ x }}{% endfor %}{{ x }}"
    ),
    "a function of one's own": (
        "{% macro range(n) %}{{ messages | length }}{% endmacro %}{% for m in messages %}{{ range(1) }}{% endfor %}"
    ),
    "loop controls": "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "inner loops": (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ loop.index }}{{ loop.last }}{{ c | tojson }}"
        "{{ messages[loop.index0].role }}{% endfor %}{{ loop.index }}{% else %}none{% endfor %}"
    ),
}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {name: build_tokenizer(template) for name, template in LOOPS.items()}


@pytest.mark.parametrize("name", LOOPS)
def test_a_template_with_a_memory_writes_what_transformers_writes(name: str, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers[name]
    template = ChatTemplate(tokenizer, {})

    @given(st.lists(EDITS, max_size=10), st.booleans())
    @settings(max_examples=25)
    def check(edits: list[tuple[Any, ...]], is_prompt: bool) -> None:
        memory, known = TemplateMemory(), RequestMemory()
        for sent, tools in conversations(edits):
            decoded, heard = known.load(json.dumps({"messages": sent}).encode())
            messages = openai_api.read_request(decoded, heard).messages
            known.keep(heard)
            forms = memory.forms(messages, inline_reasoning=False)
            plain = [message.for_template(inline_reasoning=False) for message in messages]
            assert forms == plain
            offered: Any = list(tools) or None
            expected = outcome_of_template(
                lambda plain=plain, offered=offered: tokenizer.apply_chat_template(
                    plain, tools=offered, tokenize=False, add_generation_prompt=is_prompt
                )
            )
            written = outcome_of_template(
                lambda forms=forms, offered=offered: template.render(
                    forms, tools=offered, is_prompt=is_prompt, memory=memory
                )
            )
            assert written == expected

    check()


def outcome_of_template(render: Any) -> str:
    try:
        return render()
    except (
        TemplateError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
    ) as error:  # what the gateway answers with 400
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("name", "rounds"), [("qwen3", 4), ("first message", 3), ("a part of the list", 3), ("neighbours", 5)]
)
def test_only_new_rounds_of_a_loop_are_written(
    name: str, rounds: int, tokenizers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    keep = TemplateMemory.keep

    def keeping(memory: TemplateMemory, text: str) -> str:
        written.append(text)
        return keep(memory, text)

    monkeypatch.setattr(TemplateMemory, "keep", keeping)
    template, memory = ChatTemplate(tokenizers[name], {}), TemplateMemory()
    messages = [ChatMessage(role="user", content="q")]
    for number in range(20):
        messages += [
            ChatMessage(role="assistant", content=f"a{number}"),
            ChatMessage(role="tool", content=f"t{number}"),
        ]
        written.clear()
        template.render(
            memory.forms(tuple(messages), inline_reasoning=False), tools=None, is_prompt=True, memory=memory
        )
    assert len(written) == rounds


@pytest.mark.parametrize(
    ("name", "is_remembered"),
    [("qwen3", True), ("chatml", True), ("inner loops", False), ("random", False), ("the loop itself", False)],
)
def test_a_loop_is_remembered_only_if_what_it_reads_is_known(name: str, is_remembered: bool) -> None:
    environment = ChatTemplate(build_tokenizer(LOOPS[name]), {})._environment
    loops = list(outer_loops(environment.parse(build_tokenizer(LOOPS[name]).chat_template).body))
    if is_remembered:
        read_by_loop(loops[-1], known_functions=frozenset())
    else:
        with pytest.raises(NotPureError):
            read_by_loop(loops[-1], known_functions=frozenset())
