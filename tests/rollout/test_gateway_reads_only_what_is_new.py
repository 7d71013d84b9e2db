"""What the gateway takes from earlier calls is what it would find if it read, wrote and tokenized everything anew."""

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_harness import CHATML, SHELL, build_tokenizer, misspell
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from tree_rl.rollout.gateway import anthropic_api, openai_api
from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.chat_template import ChatTemplate
from tree_rl.rollout.gateway.context_trie import Node
from tree_rl.rollout.gateway.fields import Fields, RequestError, read_json
from tree_rl.rollout.gateway.messages import ChatMessage, Keys
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.recorder import Recorder
from tree_rl.rollout.gateway.rendering import Renderer
from tree_rl.rollout.gateway.request_memory import RequestMemory
from tree_rl.rollout.gateway.session import Session
from tree_rl.rollout.gateway.template_memory import NotPureError, TemplateMemory, outer_loops, read_by_loop
from tree_rl.rollout.transcript import rows_of_calls

TEXTS = st.sampled_from(
    [
        *(
            "",
            "so",
            "sa",
            "so ",
            "the model answers",
            "ü\u0301 名\U0001f40d",
            '"messages": [',
            '\\"messages\\": [{}',
            "]}",
        ),
        *("<|im_end|>", "a<|im_start|>user\nb", "<think>\nx\n</think>\n\ny", "</think>", "<tool_response>z", "\n\n w"),
    ]
)
ARGUMENTS = st.sampled_from(
    ['{"n": 1}', '{"n":1}', '{"n": true}', '{"n": 1.0}', "{", {"n": 1}, {"n": True}, {"n": 1.0}, {"b": 1, "a": "ü"}]
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
    st.tuples(st.just("append"), MESSAGES),
    st.tuples(st.just("append"), MESSAGES),
    st.tuples(st.just("append"), MESSAGES),
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


def conversations(edits: Sequence[tuple[Any, ...]]) -> list[tuple[list[Any], tuple[Any, ...]]]:
    """Messages and tools of each call. After every fifth edit the first one comes back, as a sub-agent ends."""
    first: list[Any] = [{"role": "user", "content": "the model answers a question"}]
    found, now, tools = [(first, ())], first, ()
    for number, edit in enumerate(edits):
        tools = edit[1] if edit[0] == "offer tools" else tools
        now = first if number % 5 == 4 else edited(now, edit)
        first = now if edit[0] == "append" and number < 5 else first
        found.append((now, tools))
    return found


def outcome(read: Any) -> Any:
    try:
        return read()
    except RequestError as error:
        return str(error), error.status


DAMAGE = st.sampled_from(
    [
        lambda text: text,
        lambda text: text,
        lambda text: text[:-1],
        lambda text: text.replace("}, {", "} , \n{"),
        lambda text: text.replace("}, {", "},,{", 1),
        lambda text: text.replace("}, {", "} {", 1),
        lambda text: text.replace("}], ", "},], ", 1),
        lambda text: text[:-1] + ', "messages": [{"role": "user", "content": "last wins"}]}',
        lambda text: text[:-1] + ', "messages": null}',
        lambda text: text[:-1] + ', "m\\u0065ssages": [{"role": "user", "content": "spelled otherwise"}]}',
        lambda text: text[:-1] + ', "metadata": {"messages": [{"role": "nobody"}]}}',
        lambda text: '{"metadata": {"messages": [{"role": "nobody"}]}, ' + text[1:],
        lambda text: '{"metadata": "\\"messages\\": [", ' + text[1:],
        lambda text: text[:-1] + ', "x": NaN}',
        lambda text: text.replace('"so"', '"\\ud800"'),
        lambda text: text.replace('"so"', "NaN"),
        lambda text: text.replace('"so"', "7"),
        lambda text: text.replace("}], ", "}, 7], ", 1),
        lambda text: text.replace("so", "so\\u00fc\\n"),
        lambda text: f" \n{text} ",
        lambda text: f"[{text}]",
        lambda text: "\ufeff" + text,
    ]
)


@given(st.lists(st.tuples(EDITS, DAMAGE), max_size=12))
@settings(max_examples=150)
def test_a_body_is_read_as_if_it_were_the_first(steps: list[tuple[Any, Any]]) -> None:
    memories = {openai_api: RequestMemory(), anthropic_api: RequestMemory()}
    sent = conversations([edit for edit, _ in steps])
    for (messages, tools), (_, damage) in zip(sent, [(None, str), *steps], strict=True):
        text = damage(
            json.dumps({"model": "m", "max_tokens": 4, "messages": messages, "tools": tools, "stream": False})
        )
        body = text.encode("utf-8")
        for api, memory in memories.items():

            def remembering(api: Any = api, memory: RequestMemory = memory, body: bytes = body) -> Any:
                decoded, heard = memory.load(body)
                # Not by ==, to which 1, 1.0 and True are one.
                written = json.dumps(decoded)
                request = api.read_request(decoded, heard)
                memory.keep(heard)
                return written, repr(request)

            def forgetful(api: Any = api, body: bytes = body) -> Any:
                decoded = read_json(body)
                return json.dumps(decoded), repr(api.read_request(decoded))

            assert outcome(remembering) == outcome(forgetful)


def test_bytes_that_are_no_text_are_refused_whatever_came_before() -> None:
    memory = RequestMemory()
    decoded, heard = memory.load(b'{"messages": [{"role": "user", "content": "x"}]}')
    openai_api.read_request(decoded, heard)
    memory.keep(heard)
    with pytest.raises(RequestError, match="expected UTF-8, received byte 0xff"):
        memory.load(b'{"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "\xff"}]}')


def test_known_messages_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = openai_api._message

    def reading(fields: Fields) -> ChatMessage:
        read.append(fields.name(""))
        return original(fields)

    monkeypatch.setattr(openai_api, "_message", reading)
    memory = RequestMemory()
    messages = [{"role": "user", "content": f"question {number}"} for number in range(5)]
    for count in (2, 3, 5):
        decoded, heard = memory.load(json.dumps({"model": "m", "messages": messages[:count]}).encode())
        assert len(openai_api.read_request(decoded, heard).messages) == count
        memory.keep(heard)
    assert read == [f"messages[{number}]." for number in range(5)]


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


def test_a_message_has_another_key_behind_another_history() -> None:
    messages = [ChatMessage(role=role, content="so") for role in ("user", "assistant", "user", "assistant")]
    keys = Keys()
    known = keys.of(messages)
    assert len(set(known)) == 4
    longer = [*messages, ChatMessage(role="user", content="so")]
    assert keys.of(longer)[:4] == known
    changed = [messages[0], ChatMessage(role="assistant", content="no"), *messages[2:]]
    assert [one == other for one, other in zip(keys.of(changed), known, strict=True)] == [True, False, False, False]
    assert keys.of(longer) == Keys().of(longer)


class Dictated:
    """A model whose answers follow from the prompt alone, some of them spelled as no tokenizer spells them."""

    def __init__(self, tokenizer: Any) -> None:
        call = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
        said = [
            "so",
            "<think>\nthe model\n</think>\n\nanswers",
            f"look {call}",
            "ü\u0301 \U0001f40d",
            "<think>\nopen",
            "",
        ]
        self.answers = [tokenizer.encode(text, add_special_tokens=False) for text in said]
        self.answers += [misspell(tokenizer, text) for text in said[:3]]
        self.end = tokenizer.eos_token_id

    async def generate(self, prompt_ids: Sequence[int], *, max_tokens: int, **_: Any) -> Generation:
        ids = self.answers[sum(prompt_ids) % len(self.answers)]
        return Generation(token_ids=(*ids, self.end), log_probs=None, finish_reason="stop")


class ForgetfulKeys(Keys):
    def of(self, messages: Sequence[ChatMessage]) -> list[bytes]:
        return Keys().of(messages)


def ids_on_the_way(node: Node | None) -> tuple[int, ...]:
    return () if node is None else ids_on_the_way(node.parent) + node.ids


@pytest.fixture(scope="module", params=["reuse", "branch"])
def scene(request: Any) -> SimpleNamespace:
    tokenizer = build_tokenizer()
    options = GatewayOptions(max_context_tokens=4000, max_turn_tokens=100, on_drift=request.param)
    return SimpleNamespace(options=options, renderer=Renderer(tokenizer, {}), model=Dictated(tokenizer))


def session_of(scene: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, *, is_forgetful: bool) -> Session:
    session = Session(renderer=scene.renderer, backend=scene.model, options=scene.options, sampling={})
    session.id = "s"
    recorder = Recorder("s", renderer=scene.renderer, options=scene.options)
    if is_forgetful:
        recorder._keys, recorder._written = ForgetfulKeys(), None  # type: ignore[assignment]
    session._recorder = recorder
    make = recorder.prompt

    async def prompt(asked: Any) -> Any:
        made = await make(asked)
        if scene.options.on_drift == "reuse":
            assert made.ids == ids_on_the_way(made.node)
        return made

    monkeypatch.setattr(recorder, "prompt", prompt)
    return session


STEPS = st.one_of(
    EDITS, st.tuples(st.sampled_from(["answer", "answer without reasoning", "answer as text"]), st.none())
)
"""Most agents append what they were answered, not always as it was."""


def returned(kind: str, message: dict[str, Any]) -> dict[str, Any]:
    """An answer as an agent sends it back."""
    kept = {key: value for key, value in message.items() if key != "reasoning_content" or kind == "answer"}
    return {"role": "assistant", "content": kept["content"]} if kind == "answer as text" else kept


async def compare(steps: list[tuple[Any, ...]], remembering: Session, forgetful: Session) -> None:
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
        outcomes = []
        for session, request in (
            (remembering, remembering.read(body, openai_api)),
            (forgetful, openai_api.read_request(read_json(body))),
        ):
            try:
                outcomes.append(openai_api.answer(request, await session.start(request, agent="main")))
            except RequestError as error:
                outcomes.append({"error": str(error)})
        assert outcomes[0].get("choices") == outcomes[1].get("choices")
        assert outcomes[0].get("error") == outcomes[1].get("error")
        if "choices" in outcomes[0]:
            message = outcomes[0]["choices"][0]["message"]


def test_a_session_gives_the_ids_that_it_would_give_with_no_memory(
    scene: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    @given(st.lists(STEPS, max_size=14))
    @settings(max_examples=60)
    def check(steps: list[tuple[Any, ...]]) -> None:
        async def run() -> None:
            sessions = [session_of(scene, monkeypatch, is_forgetful=forgetful) for forgetful in (False, True)]
            await compare(steps, *sessions)
            fast, slow = [await session.close() for session in sessions]
            assert fast.calls == slow.calls
            assert fast.drift == slow.drift
            assert rows_of_calls(fast.calls) == rows_of_calls(slow.calls)

        asyncio.run(run())

    check()
