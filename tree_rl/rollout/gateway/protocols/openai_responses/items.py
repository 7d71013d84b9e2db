"""Input items to messages. Items that one turn was made of become one message again."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tree_rl.rollout.gateway.protocols.fields import Fields, RequestError, wrong
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage, unseen
from tree_rl.rollout.gateway.protocols.openai_responses.tools import NAMESPACE_MARK, custom_input, read_call
from tree_rl.rollout.gateway.protocols.sealed_reasoning import unseal

CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
UNSEEN_PARTS = {"input_image": "image", "input_file": "file", "input_audio": "sound"}
"""Types of parts that no text model reads -> what they are."""
TEXT_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


class Remembered(Protocol):
    """What a session knows of its answers."""

    def item(self, item_id: str) -> Mapping[str, Any] | None:
        """A stored output item."""

    def calls_with(self, call_id: str) -> tuple[CalledTool, ...]:
        """All tool calls of the turn that made this one; empty for a call of others."""

    def conversation(self, response_id: str) -> tuple[ChatMessage, ...]:
        """The messages up to a stored response, its own included. Raises `RequestError` for an unknown one."""


def read_items(
    items: Iterable[Fields], history: Sequence[ChatMessage], remembered: Remembered
) -> tuple[list[ChatMessage], list[str]]:
    """Read the field `input`; the messages of earlier responses stand in front.

    Returns:
        The messages, and what they hold that a text model does not see.
    """
    conversation = _Conversation(history, remembered)
    for item in items:
        conversation.add(item)
    return conversation.messages, conversation.left_out


class _Conversation:
    """Messages, and how far the last turn of the assistant has come: reasoning, text, calls, in this order."""

    def __init__(self, history: Sequence[ChatMessage], remembered: Remembered) -> None:
        self.messages = list(history)
        self.left_out: list[str] = []
        self._remembered = remembered
        self._stage = ""
        """Kind of the last item if it is the assistant's: reasoning, text or calls. Else empty."""

    def add(self, item: Fields) -> None:
        kind = item.text("type", "item_reference" if item.raw("role") is None else "message")
        if kind == "item_reference":
            name = item.text("id")
            stored = self._remembered.item(name)
            if stored is None:
                raise RequestError(f"item with id {name[:80]!r} not found", field=item.name("id"), status=404)
            item = Fields(stored, item.name("id"))
            kind = item.text("type")
        if kind == "message":
            self._add_message(item)
        elif kind == "reasoning":
            self._extend({"reasoning"}, "reasoning", reasoning=_reasoning(item))
        elif kind in CALLS:
            self._add_call(item)
        elif kind in OUTPUTS:
            output = self._text(item, "output")
            self._append(ChatMessage(role="tool", content=output, tool_call_id=item.text("call_id")), stage="")
        else:
            known = ", ".join(("message", "reasoning", *CALLS, *OUTPUTS, "item_reference"))
            raise RequestError(f"expected one of {known}, received {kind[:80]!r}", field=item.name("type"))

    def _add_message(self, item: Fields) -> None:
        role = ROLES.get(item.text("role"))
        if role is None:
            raise wrong(item.name("role"), ", ".join(ROLES), item.raw("role"))
        text = self._text(item, "content")
        if role == "assistant":
            self._extend({"reasoning"}, "text", content=text)
        else:
            self._append(ChatMessage(role=role, content=text), stage="")

    def _add_call(self, item: Fields) -> None:
        call = read_call(item)
        turn = self._remembered.calls_with(call.id)
        call = next((known for known in turn if known.id == call.id and _is_same(known, call)), call)
        place = len(self.messages) - 1
        # Clients may put each result right behind its call. The calls are one turn's all the same.
        while place >= 0 and self.messages[place].role == "tool":
            place -= 1
        behind = self.messages[place].tool_calls if place >= 0 else ()
        alike = [one for one in behind if one.id == call.id and _is_same(one, call)]
        if alike and call.id not in [message.tool_call_id for message in self.messages[place + 1 :]]:
            return
        # An id that has its result is used again: another turn.
        if self._stage == "" and not alike and behind and behind[0].id in [known.id for known in turn]:
            self.messages[place] = replace(self.messages[place], tool_calls=(*behind, call))
            return
        calls = self.messages[-1].tool_calls if self._stage else ()
        self._extend({"reasoning", "text", "calls"}, "calls", tool_calls=(*calls, call))

    def _text(self, fields: Fields, key: str) -> str:
        """A text, or the joined texts of a list of parts."""
        content = fields.raw(key)
        if isinstance(content, str):
            return content
        texts = []
        for part in fields.objects(key, required=True):
            kind = part.text("type")
            if kind in UNSEEN_PARTS:
                self.left_out.append(UNSEEN_PARTS[kind])
                texts.append(unseen(UNSEEN_PARTS[kind], part.text("filename", "")))
            elif kind in TEXT_PARTS:
                texts.append(part.text(TEXT_PARTS[kind]))
            else:
                raise RequestError(f"expected text, received a part of type {kind[:80]!r}", field=part.name("type"))
        return "\n".join(texts)

    def _extend(self, stages: set[str], stage: str, **parts: Any) -> None:
        """Go on with the assistant's last turn if it is at one of these stages, else begin one."""
        if self._stage not in stages:
            self._append(ChatMessage(role="assistant", **parts), stage=stage)
            return
        last = self.messages[-1]
        if stage == "reasoning":
            parts = {"reasoning": "\n".join(text for text in (last.reasoning, parts["reasoning"]) if text) or None}
        self.messages[-1] = replace(last, **parts)
        self._stage = stage

    def _append(self, message: ChatMessage, *, stage: str) -> None:
        self.messages.append(message)
        self._stage = stage


def _reasoning(item: Fields) -> str | None:
    """The token says it exactly, then the plain text, then the summary, which is all of it as well."""
    token = item.text("encrypted_content", "")
    opened = unseal(token)
    if opened is not None:
        return opened
    for key in ("content", "summary"):
        texts = [part.text("text") for part in item.objects(key)]
        if any(texts):
            return "\n".join(texts)
    if token:
        raise RequestError(
            "expected a token that this gateway gave",
            field=item.name("encrypted_content"),
            code="invalid_encrypted_content",
        )
    return None


def _is_same(known: CalledTool, sent: CalledTool) -> bool:
    """Whether a client sent back a call as it was given. It may leave out the namespace."""
    if sent.arguments in (known.arguments, {"input": custom_input(known)}):
        return known.name == sent.name or known.name.endswith(NAMESPACE_MARK + sent.name)
    return False
