"""The gateway's chat template writes what transformers writes, and stays in its sandbox."""

from collections.abc import Mapping
from typing import Any

import pytest
from gateway_harness import CHATML, SHELL, build_tokenizer
from hostile_conversations import EDITS, conversations
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import SecurityError, TemplateError

from tree_rl.rollout.gateway.dialects.hermes import Hermes
from tree_rl.rollout.gateway.protocols import openai_chat
from tree_rl.rollout.gateway.tokens.chat_template import ChatTemplate
from tree_rl.rollout.gateway.tokens.rendering import Renderer
from tree_rl.rollout.gateway.tokens.template_form import TemplateForm, conversation_of

CALL = {"type": "function", "id": "c1", "function": {"name": "shell", "arguments": {"command": "ls '<&>' ü"}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "a", "tool_call_id": "c1"},
        {"role": "tool", "content": "b", "tool_call_id": "c1"},
        {"role": "assistant", "content": "<think>\nx\n</think>\n\ny"},
        {"role": "user", "content": "so"},
    ],
]
TEMPLATES = {
    "reasoning": None,
    "chatml": CHATML,
    "generation and loop controls": (
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}[{{ m.role }}]"
        "{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}{% endfor %}{{ eos_token }}"
        "{{ tools | tojson(indent=2) }}{{ messages | length }}{{ '%s|%d' | format('a', 3) }}"
        "{{ messages[0].items() | list | length }}{{ messages[0].content.upper().strip() }}{{ shout or 'no' }}"
    ),
}

LOOPS = {
    "reasoning": None,
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
    "a name of its own": (
        "{% set x = messages | length %}{% for m in messages %}{{ x }}{% set x = m.content %}{{ x }}{% endfor %}{{ x }}"
    ),
    "a function of its own": (
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


def search(initial: str, condition: str, sets: str) -> str:
    pairs = [pair.partition("=")[::2] for pair in sets.split()]
    body = condition + "".join(f"{{% set ns.{name} = {value} %}}" for name, value in pairs) + "{% endif %}"
    made = " ~ '|' ~ ".join(f"(ns.{name}|string)" for name, _ in pairs)
    return SEARCH.replace("INITIAL", initial).replace("BODY", body).replace("MADE", made)


LOOPS |= {
    "search: last user": search(
        "open=true, last=messages|length - 1", "{% if ns.open and m.role == 'user' %}", "open=false last=index"
    ),
    "search: undefined": search("last=0", "{% if m.role == 'assistant' %}", "last=m.reasoning_content"),
    "search: undefined first": search("other=0", "{% if m.role == 'tool' and not ns.seen %}", "seen=true other=index"),
    "search: a message": search("last=none", "{% if not ns.last %}", "last=m"),
    "search: one and true": search("last=0", "{% if m.tool_calls %}", "last=m.tool_calls[0].function.arguments.n"),
    "search: another message": search("last=0", "{% if messages[index].role == 'user' %}", "last=index"),
    "search: the namespace as a whole": (
        "{% set ns = namespace(x=0) %}{% for m in messages[::-1] %}{% if ns %}{% set ns.x = m.role %}"
        "{% endif %}{% endfor %}{{ ns.x }}"
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def compiled(tokenizer: Any, options: Mapping[str, Any] | None = None) -> ChatTemplate:
    return ChatTemplate(tokenizer.chat_template, {**tokenizer.special_tokens_map, **(options or {})})


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [SHELL]])
@pytest.mark.parametrize("is_prompt", [False, True])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False, "shout": "YES"}])
def test_text_is_what_transformers_renders(name: str, tools: Any, is_prompt: bool, options: dict[str, Any]) -> None:
    tokenizer = build_tokenizer(TEMPLATES[name])
    template = compiled(tokenizer, options)
    for conversation in CONVERSATIONS * 2:
        expected = tokenizer.apply_chat_template(
            conversation, tools=tools, add_generation_prompt=is_prompt, tokenize=False, **options
        )
        assert template.render(conversation, tools=tools, is_prompt=is_prompt) == expected


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_is_held_in_the_sandbox_that_transformers_has(attack: str) -> None:
    tokenizer = build_tokenizer("{{ messages[0].content.strip() }}{{ messages | length }}" + attack)
    conversation = [{"role": "user", "content": "hi"}]

    def outcome(render: Any) -> str:
        try:
            return render()
        except (SecurityError, TemplateError) as error:
            return type(error).__name__

    template = compiled(tokenizer)
    expected = outcome(lambda: tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    for _ in range(2):
        assert outcome(lambda: template.render(conversation, tools=None, is_prompt=True)) == expected
    assert "list" not in expected and "object" not in expected


def test_a_template_that_transformers_renders_otherwise_is_refused() -> None:
    tokenizer = build_tokenizer(CHATML)
    render = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *args, **kwargs: render(*args, **kwargs) + "!"
    with pytest.raises(ValueError, match="expected what transformers renders"):
        Renderer(tokenizer, {})


@pytest.mark.parametrize("name", LOOPS)
def test_whatever_agents_send_is_written_as_transformers_writes_it(
    name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", LOOPS[name] or tokenizer.chat_template)
    template = compiled(tokenizer)

    @given(st.lists(EDITS, max_size=10), st.booleans())
    @settings(max_examples=15)
    def check(edits: list[tuple[Any, ...]], is_prompt: bool) -> None:
        for sent, tools in conversations(edits):
            messages = openai_chat.read_request({"messages": sent}).messages
            forms = conversation_of(messages, TemplateForm(), Hermes())
            offered: Any = list(tools) or None
            expected = outcome_of_template(
                lambda forms=forms, offered=offered: tokenizer.apply_chat_template(
                    forms, tools=offered, tokenize=False, add_generation_prompt=is_prompt
                )
            )
            written = outcome_of_template(
                lambda forms=forms, offered=offered: template.render(forms, tools=offered, is_prompt=is_prompt)
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
