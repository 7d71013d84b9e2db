"""Converts input items to messages. The items of one turn become one message again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tree_rl.rollout.gateway.protocols.demands import NAMESPACE_MARK
from tree_rl.rollout.gateway.protocols.fields import Fields, RequestError, wrong
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage, Media, SentImage
from tree_rl.rollout.gateway.protocols.openai_chat import text_of
from tree_rl.rollout.gateway.protocols.openai_responses.tools import custom_input, read_call
from tree_rl.rollout.gateway.protocols.sealed_reasoning import unseal

CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


class Remembered(Protocol):
    """A session's stored answers."""

    def item(self, item_id: str) -> Mapping[str, Any] | None:
        """A stored output item; None if it is unknown."""

    def calls_with(self, call_id: str) -> tuple[CalledTool, ...]:
        """All tool calls of the turn that made this call; empty if no turn of the session did."""

    def conversation(self, response_id: str) -> tuple[tuple[ChatMessage, ...], Mapping[str, SentImage]]:
        """The messages up to a stored response, including it, and their images.

        Raises `RequestError` for an unknown response.
        """


class Conversation:
    """The messages of earlier responses and, with `add`, of the items of the field `input` after them."""

    def __init__(self, history: Sequence[ChatMessage], remembered: Remembered, media: Media) -> None:
        self.messages = list(history)
        self._remembered = remembered
        self._media = media
        self._stage = ""
        """Kind of the last item if it is the assistant's, else empty. Each turn: reasoning, text, calls."""

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
            output = text_of(item, "output", self._media)
            self._append(ChatMessage(role="tool", content=output, tool_call_id=item.text("call_id")), stage="")
        else:
            known = ", ".join(("message", "reasoning", *CALLS, *OUTPUTS, "item_reference"))
            raise RequestError(f"expected one of {known}, received {kind[:80]!r}", field=item.name("type"))

    def _add_message(self, item: Fields) -> None:
        role = ROLES.get(item.text("role"))
        if role is None:
            raise wrong(item.name("role"), ", ".join(ROLES), item.raw("role"))
        text = text_of(item, "content", self._media)
        if role == "assistant":
            self._extend({"reasoning"}, "text", content=text)
        else:
            self._append(ChatMessage(role=role, content=text), stage="")

    def _add_call(self, item: Fields) -> None:
        call = read_call(item)
        turn = self._remembered.calls_with(call.id)
        call = next((known for known in turn if known.id == call.id and _is_same(known, call)), call)
        place = len(self.messages) - 1
        # Clients may put each result directly after its call; such calls still belong to one turn.
        while place >= 0 and self.messages[place].role == "tool":
            place -= 1
        earlier = self.messages[place].tool_calls if place >= 0 else ()
        is_repeated = any(one.id == call.id and _is_same(one, call) for one in earlier)
        if is_repeated and call.id not in [message.tool_call_id for message in self.messages[place + 1 :]]:
            return
        # An id that already has its result and is used again starts another turn.
        if self._stage == "" and not is_repeated and earlier and earlier[0].id in [known.id for known in turn]:
            self.messages[place] = replace(self.messages[place], tool_calls=(*earlier, call))
            return
        calls = self.messages[-1].tool_calls if self._stage else ()
        self._extend({"reasoning", "text", "calls"}, "calls", tool_calls=(*calls, call))

    def _extend(self, stages: set[str], stage: str, **parts: Any) -> None:
        """Extend the assistant's last turn if it is at one of these stages, else start one."""
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
    """The reasoning of an item: from the token, which is exact, else from the text, else from the summary."""
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
    """True if a client sent back a call unchanged, perhaps without its namespace."""
    if sent.arguments in (known.arguments, {"input": custom_input(known)}):
        return known.name == sent.name or known.name.endswith(NAMESPACE_MARK + sent.name)
    return False
