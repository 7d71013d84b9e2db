"""The gateway's chat template writes what transformers writes, and stays in its sandbox."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from gateway_harness import CHATML, SHELL, build_tokenizer
from hostile_conversations import EDITS, edited
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


def compiled(tokenizer: Any, options: Mapping[str, Any] | None = None) -> ChatTemplate:
    return ChatTemplate(tokenizer.chat_template, {**tokenizer.special_tokens_map, **(options or {})})


def outcome(render: Callable[[], str]) -> str:
    """What is written, or the error that the gateway answers with status 400."""
    try:
        return render()
    except (SecurityError, TemplateError, TypeError, KeyError, IndexError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


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

    template = compiled(tokenizer)
    expected = outcome(lambda: tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    for _ in range(2):
        assert outcome(lambda: template.render(conversation, tools=None, is_prompt=True)) == expected
    assert "<class" not in expected


def test_a_template_that_transformers_renders_otherwise_is_refused() -> None:
    tokenizer = build_tokenizer(CHATML)
    render = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *args, **kwargs: render(*args, **kwargs) + "!"
    with pytest.raises(ValueError, match="expected what transformers renders"):
        Renderer(tokenizer, {})


@given(st.lists(EDITS, max_size=10), st.booleans())
@settings(max_examples=60)
def test_whatever_agents_send_is_written_as_transformers_writes_it(
    edits: list[tuple[Any, ...]], is_prompt: bool
) -> None:
    tokenizer = build_tokenizer()
    template = compiled(tokenizer)
    conversation, tools = [{"role": "user", "content": "the model answers a question"}], ()
    for edit in edits:
        tools = edit[1] if edit[0] == "offer tools" else tools
        conversation = edited(conversation, edit)
    messages = openai_chat.read_request({"messages": conversation}).messages
    forms = conversation_of(messages, TemplateForm(), Hermes())
    offered: Any = list(tools) or None

    def expected() -> str:
        return tokenizer.apply_chat_template(forms, tools=offered, tokenize=False, add_generation_prompt=is_prompt)

    def written() -> str:
        return template.render(forms, tools=offered, is_prompt=is_prompt)

    assert outcome(written) == outcome(expected)
