"""Converts messages to a chat template's form. Templates differ in their fields and in what they refuse."""

import json
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from tree_rl.rollout.gateway.dialects.dialect import Dialect
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage
from tree_rl.rollout.gateway.protocols.tool_results import answered_calls

PROBE = "reasoning-probe"
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
OTHER = "other-probe"


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateForm:
    """The form of messages that a template expects."""

    reasoning_field: str | None = "reasoning_content"
    """Name of the field for reasoning; None if reasoning belongs into the text."""
    has_text_arguments: bool = False
    """True if arguments of calls must be JSON text, not an object."""
    is_text_or_reasoning: bool = False
    """True if a message with calls cannot have both text and reasoning (gpt-oss): then its text is dropped."""
    folds_system: bool = False
    """True if a system message is allowed only at the start, or the template moves it there."""
    joins_questions: bool = False
    """True if two consecutive user messages are refused."""


def conversation_of(messages: Sequence[ChatMessage], form: TemplateForm, dialect: Dialect) -> list[dict[str, Any]]:
    """Convert a conversation to a template's form."""
    if form.folds_system or form.joins_questions:
        messages = folded(messages, form)
    ids = _written_ids(messages, dialect)
    return [_message(message, form, dialect, ids[place]) for place, message in enumerate(messages)]


def _written_ids(messages: Sequence[ChatMessage], dialect: Dialect) -> list[list[str]]:
    """The ids in each message: of its calls, or of the call that it answers.

    They depend only on the messages up to it, so that later messages do not change a prompt's prefix.
    """
    answered = answered_calls(messages)
    ids: list[list[str]] = []
    used: set[str] = set()
    num_calls = 0
    for place, message in enumerate(messages):
        written: list[str] = []
        for call in message.tool_calls:
            standing = call.written_id or _new_id(call, dialect, num_calls, used)
            num_calls += 1
            used.add(standing)
            written.append(standing)
        called, sent = answered[place], message.tool_call_id
        if called is not None:
            written = [ids[called[0]][called[1]]]
        elif sent is not None:
            written = [dialect.call_id(sent, name=message.name or "tool", index=num_calls)]
        ids.append(written)
    return ids


def _new_id(call: CalledTool, dialect: Dialect, index: int, used: Set[str]) -> str:
    """An id that no earlier call has, in families that generate ids."""
    sent = call.id
    while (made := dialect.call_id(sent, name=call.name, index=index)) in used and made != call.id:
        index += 1
        sent = f"{call.id}#{index}"
    return made


def folded(messages: Sequence[ChatMessage], form: TemplateForm) -> list[ChatMessage]:
    """Append later system messages to the message before them; after an answer they become user messages."""
    whole: list[ChatMessage] = []
    for message in messages:
        last = whole[-1] if whole else None
        is_later_system = form.folds_system and message.role == "system" and last is not None
        is_second_question = (
            form.joins_questions and message.role == "user" and last is not None and last.role == "user"
        )
        if last is not None and (is_second_question or (is_later_system and last.role != "assistant")):
            whole[-1] = replace(last, content=f"{last.content}\n\n{message.content}")
        else:
            whole.append(replace(message, role="user") if is_later_system else message)
    return whole


def find_form(render: Callable[[Sequence[ChatMessage], TemplateForm], str], dialect: Dialect) -> TemplateForm:
    """Find the form that a template expects by rendering probes; `render` raises `RequestError` for those refused."""
    asked, answered = ChatMessage(role="user", content="x"), ChatMessage(role="assistant", content="y")

    def written(messages: Sequence[ChatMessage], form: TemplateForm) -> str:
        try:
            return render(messages, form)
        except RequestError:
            return ""

    call = CalledTool(id="call_probe", name="probe", arguments={OTHER: "y"})
    called = [asked, ChatMessage(role="assistant", tool_calls=(call,))]
    form = TemplateForm(reasoning_field=None)
    as_object, with_text = written(called, form), replace(form, has_text_arguments=True)
    if (not as_object or f"'{OTHER}'" in as_object) and written(called, with_text):
        form = with_text
    # Some templates render reasoning only in tool loops.
    thoughts = [[asked, replace(message, reasoning=PROBE)] for message in (answered, called[1])]
    for field in REASONING_FIELDS:
        with_field = replace(form, reasoning_field=field)
        if any(PROBE in written(thought, with_field) for thought in thoughts):
            form = with_field
            break
    both = [asked, replace(called[1], content="y", reasoning="z")]
    if form.reasoning_field is not None and written(called, form) and not written(both, form):
        form = replace(form, is_text_or_reasoning=True)
    form = replace(form, joins_questions=bool(written([asked], form)) and not written([asked, asked], form))
    later = written(
        [asked, replace(answered, content=PROBE), replace(asked, role="system", content=OTHER), asked], form
    )
    return replace(form, folds_system=not 0 <= later.find(PROBE) < later.find(OTHER))


def _message(message: ChatMessage, form: TemplateForm, dialect: Dialect, ids: Sequence[str]) -> dict[str, Any]:
    content = message.content
    if form.is_text_or_reasoning and message.tool_calls and message.reasoning:
        content = ""
    read: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning is not None:
        if form.reasoning_field is None:
            read["content"] = dialect.with_reasoning(message.reasoning, content)
        else:
            read[form.reasoning_field] = message.reasoning
    if message.tool_calls:
        read["tool_calls"] = [_call(call, form, id_) for call, id_ in zip(message.tool_calls, ids, strict=True)]
    elif ids:
        read["tool_call_id"] = ids[0]
    if message.name is not None:
        read["name"] = message.name
    return read


def _call(call: CalledTool, form: TemplateForm, written_id: str) -> dict[str, Any]:
    arguments = call.arguments
    if form.has_text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"type": "function", "id": written_id, "function": function}
