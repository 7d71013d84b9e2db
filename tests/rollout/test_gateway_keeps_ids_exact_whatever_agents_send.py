"""Whatever an agent does to its conversation, prompts have the recorded ids, and all that was generated is trained.

The gateway's chat template writes what transformers writes, and stays in its sandbox.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from gateway_harness import CHATML, SHELL, build_tokenizer, generated_edges, misspell, trained_edges
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import SecurityError, TemplateError

from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.dialects.json_arguments import Hermes
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.protocols import openai_chat
from tree_rl.rollout.gateway.protocols.fields import RequestError, read_json
from tree_rl.rollout.gateway.session import Session
from tree_rl.rollout.gateway.tokens.chat_template import ChatTemplate
from tree_rl.rollout.gateway.tokens.context_trie import Node
from tree_rl.rollout.gateway.tokens.rendering import Renderer
from tree_rl.rollout.gateway.tokens.template_form import TemplateForm, conversation_of
from tree_rl.rollout.transcript import rows_of_calls

TEXTS = st.sampled_from(
    [
        *("", "so", "sa", "so ", "the model answers", "ü\u0301 名\U0001f40d"),
        *('"messages": [', '\\"messages\\": [{}', "]}"),
        *("<|im_end|>", "a<|im_start|>user\nb", "<think>\nx\n</think>\n\ny", "</think>", "<tool_response>z", "\n\n w"),
    ]
)
ARGUMENTS = st.sampled_from(
    ['{"n": 1}', '{"n":1}', '{"n": true}', '{"n": 1.0}', "{", {"n": 1}, {"n": True}, {"n": 1.0}, {"b": 1, "a": "<&> ü"}]
)
CALLS = st.lists(ARGUMENTS, max_size=2).map(
    lambda given: [{"id": "c", "type": "function", "function": {"name": "shell", "arguments": a}} for a in given]
)
MESSAGES = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, TEXTS),
    st.builds(lambda text: {"role": "tool", "tool_call_id": "c", "content": text}, TEXTS),
    st.builds(lambda text: {"role": "system", "content": [{"type": "text", "text": text}]}, TEXTS),
    st.builds(lambda text, calls: {"role": "assistant", "content": text, "tool_calls": calls}, TEXTS, CALLS),
    st.builds(lambda t, r: {"role": "assistant", "content": t, "reasoning_content": r, "tool_calls": []}, TEXTS, TEXTS),
)
EDITS = st.one_of(
    *[st.tuples(st.just("append"), MESSAGES)] * 3,
    st.tuples(st.just("replace"), st.integers(0, 20), MESSAGES),
    st.tuples(st.just("lengthen"), st.integers(0, 20)),
    st.tuples(st.just("drop"), st.integers(0, 20)),
    st.tuples(st.just("cut"), st.integers(1, 20)),
    st.tuples(st.just("start anew"), MESSAGES),
    st.tuples(st.just("offer tools"), st.sampled_from([(), (SHELL,), (SHELL, SHELL)])),
)
"""What an agent does to its conversation between two calls."""


def edited(conversation: list[Any], edit: tuple[Any, ...]) -> list[Any]:
    """The conversation afterwards; never empty."""
    place = edit[1] % len(conversation) if isinstance(edit[1], int) else 0
    match edit[0]:
        case "append":
            return [*conversation, edit[1]]
        case "replace":
            return [*conversation[:place], edit[2], *conversation[place + 1 :]]
        case "lengthen":
            old = conversation[place]
            longer = {**old, "content": f"{old['content']} "} if isinstance(old["content"], str) else old
            return [*conversation[:place], longer, *conversation[place + 1 :]]
        case "drop":
            return conversation[:place] + conversation[place + 1 :] or conversation
        case "cut":
            return conversation[: place + 1]
        case "start anew":
            return [edit[1]]
    return conversation


class Dictated:
    """A model whose answers follow from the prompt alone, some of them spelled as no tokenizer spells them."""

    def __init__(self, tokenizer: Any) -> None:
        call = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
        said = ["so", "<think>\nthe model\n</think>\n\nanswers", f"look {call}"]
        said += ["ü\u0301 \U0001f40d", "<think>\nopen", ""]
        self.answers = [tokenizer.encode(text, add_special_tokens=False) for text in said]
        self.answers += [misspell(tokenizer, text) for text in said[:3]]
        self.end = tokenizer.eos_token_id

    async def generate(self, prompt_ids: Sequence[int], *, max_tokens: int, **_: Any) -> Generation:
        ids = self.answers[sum(prompt_ids) % len(self.answers)]
        return Generation(token_ids=(*ids, self.end), log_probs=None, finish_reason="stop")


def ids_on_the_way(node: Node | None) -> tuple[int, ...]:
    return () if node is None else ids_on_the_way(node.parent) + node.ids


@pytest.fixture(scope="module", params=["reuse", "branch"])
def open_session(request: Any) -> Callable[[], Session]:
    """Opens sessions whose prompts are compared with the trie's ids, or with the tokenizer's."""
    tokenizer = build_tokenizer()
    options = GatewayOptions(max_context_tokens=4000, max_turn_tokens=100, on_drift=request.param)
    renderer, model = Renderer(tokenizer, {}), Dictated(tokenizer)

    def opened() -> Session:
        session = Session(renderer=renderer, backend=model, options=options, sampling={})
        make = session._recorder.make_prompt

        async def prompt(asked: Any) -> Any:
            made = await make(asked)
            if request.param == "reuse":
                assert made.ids == ids_on_the_way(made.node)
            else:
                assert list(made.ids) == tokenizer.encode(made.text, add_special_tokens=False)
            return made

        session._recorder.make_prompt = prompt
        return session

    return opened


STEPS = st.one_of(
    EDITS, st.tuples(st.sampled_from(["answer", "answer without reasoning", "answer as text"]), st.none())
)
"""Most agents append what they were answered, not always as it was."""


def returned(kind: str, message: dict[str, Any]) -> dict[str, Any]:
    """An answer as an agent sends it back."""
    kept = {key: value for key, value in message.items() if key != "reasoning_content" or kind == "answer"}
    return {"role": "assistant", "content": kept["content"]} if kind == "answer as text" else kept


async def play(steps: list[tuple[Any, ...]], session: Session) -> None:
    """Ask after every step."""
    conversation: list[Any] = [{"role": "user", "content": "the model answers a question"}]
    tools: tuple[Any, ...] = (SHELL,)
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for step in [("append", {"role": "user", "content": "so"}), *steps]:
        tools = step[1] if step[0] == "offer tools" else tools
        if step[0].startswith("answer"):
            conversation = [*conversation, returned(step[0], message), {"role": "tool", "content": "t"}]
        else:
            conversation = edited(conversation, step)
        body = json.dumps({"model": "m", "messages": conversation, "tools": tools}).encode()
        request = openai_chat.read_request(read_json(body))
        try:
            answer = openai_chat.answer(request, await session.start_answer(request))
        except RequestError:
            continue
        message = answer["choices"][0]["message"]


@given(steps=st.lists(STEPS, max_size=14))
@settings(max_examples=30)
def test_prompts_are_exact_and_all_that_was_generated_is_trained(
    open_session: Callable[[], Session], steps: list[tuple[Any, ...]]
) -> None:
    async def run() -> None:
        session = open_session()
        await play(steps, session)
        calls = (await session.close()).calls
        assert trained_edges(rows_of_calls(calls)) == generated_edges(calls)

    asyncio.run(run())


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


@cache
def written_in(name: str) -> Any:
    """A tokenizer with a template of this name."""
    return build_tokenizer(TEMPLATES[name])


def compiled(tokenizer: Any, **options: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer.chat_template, {**tokenizer.special_tokens_map, **options})


def outcome(render: Callable[[], str]) -> str:
    """What is written, or the error that the gateway answers with status 400."""
    try:
        return render()
    except (SecurityError, TemplateError, TypeError, KeyError, IndexError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


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


def test_a_template_that_drops_texts_is_refused() -> None:
    # SmolVLM and Idefics 3 have such templates.
    parts = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    with pytest.raises(ValueError, match="expected one that writes texts, not only lists of parts"):
        Renderer(build_tokenizer(CHATML.replace("{{ m.content }}", parts)), {})


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False, "shout": "YES"}])
@pytest.mark.parametrize("name", TEMPLATES)
@given(edits=st.lists(EDITS, max_size=10), is_prompt=st.booleans())
@settings(max_examples=20)
def test_whatever_agents_send_is_written_as_transformers_writes_it(
    name: str, options: dict[str, Any], edits: list[tuple[Any, ...]], is_prompt: bool
) -> None:
    tokenizer = written_in(name)
    template = compiled(tokenizer, **options)
    conversation, tools = [{"role": "user", "content": "the model answers a question"}], ()
    for edit in edits:
        tools = edit[1] if edit[0] == "offer tools" else tools
        conversation = edited(conversation, edit)
    messages = openai_chat.read_request({"messages": conversation}).messages
    forms = conversation_of(messages, TemplateForm(), Hermes())
    offered: Any = list(tools) or None

    asked = {"tokenize": False, "add_generation_prompt": is_prompt, **options}
    expected = outcome(lambda: tokenizer.apply_chat_template(forms, tools=offered, **asked))
    assert outcome(lambda: template.render(forms, tools=offered, is_prompt=is_prompt)) == expected
