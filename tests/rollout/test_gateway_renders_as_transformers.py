"""The gateway's chat template writes what transformers writes, and stays in its sandbox."""

from typing import Any

import pytest
from gateway_harness import CHATML, SHELL, build_tokenizer
from jinja2.exceptions import SecurityError, TemplateError

from tree_rl.rollout.gateway.chat_template import ChatTemplate
from tree_rl.rollout.gateway.rendering import Renderer

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
    "qwen3": None,
    "chatml": CHATML,
    "generation and loop controls": (
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}[{{ m.role }}]"
        "{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}{% endfor %}{{ eos_token }}"
        "{{ tools | tojson(indent=2) }}{{ messages | length }}{{ '%s|%d' | format('a', 3) }}"
        "{{ messages[0].items() | list | length }}{{ messages[0].content.upper().strip() }}{{ shout or 'no' }}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [SHELL]])
@pytest.mark.parametrize("is_prompt", [False, True])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False, "shout": "YES"}])
def test_text_is_what_transformers_renders(name: str, tools: Any, is_prompt: bool, options: dict[str, Any]) -> None:
    tokenizer = build_tokenizer(TEMPLATES[name])
    template = ChatTemplate(tokenizer, options)
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

    template = ChatTemplate(tokenizer, {})
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
