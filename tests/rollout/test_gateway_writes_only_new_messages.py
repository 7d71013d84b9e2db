"""A template that recalls what it wrote for earlier messages writes what transformers writes for all of them."""

import json
from typing import Any

import pytest
from gateway_harness import CHATML, build_tokenizer
from hostile_conversations import EDITS, conversations
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError, nodes

from tree_rl.rollout.gateway import openai_api
from tree_rl.rollout.gateway.chat_template import ChatTemplate
from tree_rl.rollout.gateway.messages import ChatMessage
from tree_rl.rollout.gateway.request_memory import RequestMemory
from tree_rl.rollout.gateway.template_memory import TemplateMemory
from tree_rl.rollout.gateway.template_reading import NotPureError, outer_loops, read_by_loop, read_by_search

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
SEARCH = (
    "{%- set ns = namespace(INITIAL) %}{%- for m in messages[::-1] %}"
    "{%- set index = (messages|length - 1) - loop.index0 %}BODY{%- endfor %}{{ MADE }}"
)
"""What templates do to find the last question."""
SEARCHES = {
    "last user": (
        "open=true, last=messages|length - 1",
        "{% if ns.open and m.role == 'user' %}",
        "open=false last=index",
    ),
    "first user": ("last=messages|length - 1", "{% if m.role == 'user' %}", "last=index"),
    "number of users": ("n=0", "{% if m.role == 'user' %}", "n=ns.n+1"),
    "number from a start": ("n=messages|length", "{% if m.role == 'user' and m.content %}", "n=ns.n+1"),
    "place of the greatest": ("best=0", "{% if m.content|length > ns.best %}", "best=m.content|length at=index"),
    "undefined": ("last=0", "{% if m.role == 'assistant' %}", "last=m.reasoning_content"),
    "undefined first": ("other=0", "{% if m.role == 'tool' and not ns.seen %}", "seen=true other=index"),
    "a value from outside": ("last=0", "{% if m.role == 'user' or not tools %}", "last=add_generation_prompt"),
    "a message": ("last=none", "{% if not ns.last %}", "last=m"),
    "one and true": ("last=0", "{% if m.tool_calls %}", "last=m.tool_calls[0].function.arguments.n"),
    "length alone": ("last=0", "{% if m.role == 'user' %}", "last=messages|length"),
    "place from the end": ("last=0", "{% if m.role == 'user' %}", "last=loop.index0"),
    "the last round": ("last=0", "{% if loop.last %}", "last=m.content"),
    "another message": ("last=0", "{% if messages[index].role == 'user' %}", "last=index"),
}


def search(initial: str, condition: str, sets: str) -> str:
    pairs = [pair.partition("=")[::2] for pair in sets.split()]
    body = condition + "".join(f"{{% set ns.{name} = {value} %}}" for name, value in pairs) + "{% endif %}"
    made = " ~ '|' ~ ".join(f"(ns.{name}|string)" for name, _ in pairs)
    return SEARCH.replace("INITIAL", initial).replace("BODY", body).replace("MADE", made)


LOOPS |= {f"search: {name}": search(*parts) for name, parts in SEARCHES.items()}
LOOPS |= {
    "search: two names": (
        "{% set a = namespace(x=0) %}{% set b = a %}"
        "{% for m in messages[::-1] %}{% if a.x < 2 %}{% set b.x = b.x + 1 %}{% endif %}{% endfor %}{{ a.x }}{{ b.x }}"
    ),
    "search: that writes": (
        "{% set ns = namespace(x=0) %}{% for m in messages[::-1] %}{{ m.role }}{% set ns.x = 1 %}{% endfor %}"
    ),
    "search: the namespace as a whole": (
        "{% set ns = namespace(x=0) %}{% for m in messages[::-1] %}{% if ns %}{% set ns.x = m.role %}"
        "{% endif %}{% endfor %}{{ ns.x }}"
    ),
    "search: for another value": (
        "{% set kind = messages[-1].role %}" + search("x=-1", "{% if m.role == kind and index < 2 %}", "x=index")
    ),
    "search: for one or true": search(
        "x=(messages[-1].role == 'user' or 1), y=0", "{% if index == 0 %}", "y=ns.x|string"
    ),
    "search: with another start": (
        "{% set ns = namespace(x=0, y=0) %}{% set ns.y = messages[-1].role %}"
        "{% for m in messages[::-1] %}{% if m.role != ns.y %}{% set ns.x = m.content %}"
        "{% endif %}{% endfor %}{{ ns.x }}"
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


def render_growing(tokenizer: Any, log: list[Any]) -> None:
    """Render twenty times a conversation that grows; the log is left with what the last rendering added to it."""
    template, memory = ChatTemplate(tokenizer, {}), TemplateMemory()
    messages = [ChatMessage(role="user", content="q")]
    for number in range(20):
        messages += [
            ChatMessage(role="assistant", content=f"a{number}"),
            ChatMessage(role="tool", content=f"t{number}"),
        ]
        log.clear()
        template.render(
            memory.forms(tuple(messages), inline_reasoning=False), tools=None, is_prompt=True, memory=memory
        )


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
    render_growing(tokenizers[name], written)
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


@pytest.mark.parametrize("name", [name for name in LOOPS if name == "qwen3" or name.startswith("search")])
def test_a_search_is_remembered_only_if_what_it_reads_is_known(name: str, tokenizers: dict[str, Any]) -> None:
    environment = ChatTemplate(tokenizers[name], {})._environment
    loops = list(outer_loops(environment.parse(tokenizers[name].chat_template).body))
    found = next(loop for loop in loops if isinstance(loop.iter, nodes.Getitem))
    unknown = (
        "length alone",
        "place from the end",
        "the last round",
        "another message",
        "two names",
        "writes",
        "whole",
    )
    if name.endswith(unknown):
        with pytest.raises(NotPureError):
            read_by_search(found, known_functions=frozenset())
    else:
        read_by_search(found, known_functions=frozenset())


@pytest.mark.parametrize(
    ("name", "rounds"),
    [("qwen3", 3), ("search: first user", 3), ("search: last user", 3)],
)
def test_a_search_ends_where_an_earlier_one_came(
    name: str, rounds: int, tokenizers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    recall = TemplateMemory.recall_search

    def recalling(*arguments: Any) -> bool:
        asked.append(recall(*arguments))
        return asked[-1]

    monkeypatch.setattr(TemplateMemory, "recall_search", recalling)
    render_growing(tokenizers[name], asked)
    assert asked == [False] * (rounds - 1) + [True]
