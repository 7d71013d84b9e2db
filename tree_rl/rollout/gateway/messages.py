"""Chat messages in one form for both APIs, and keys by which a message is recognised when it comes back.

Clients re-serialise what they received: extra fields appear, arguments are spaced differently, null becomes "", the
reasoning field is dropped. Keys see nothing of that.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

KEPT = 8
"""Conversations of a session whose keys are remembered: an agent's and its sub-agents'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalledTool:
    """One tool call in an assistant message."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str
    """Decoded; the text as sent if it is no JSON object."""

    @property
    def arguments_json(self) -> str:
        """The arguments as the OpenAI API carries them."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
    """One message."""

    role: str
    """system, user, assistant or tool."""
    content: str = ""
    reasoning: str | None = None
    """An assistant's reasoning, apart from its text; None if there is none."""
    tool_calls: tuple[CalledTool, ...] = ()
    tool_call_id: str | None = None
    """The call that a tool message answers."""
    name: str | None = None

    def for_template(self, *, inline_reasoning: bool) -> dict[str, Any]:
        """The message as chat templates read it.

        Args:
            inline_reasoning: put reasoning into the text, for templates that know no field for it.
        """
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            if inline_reasoning:
                message["content"] = f"<think>\n{self.reasoning}\n</think>\n\n{self.content}"
            else:
                message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message


class Keys:
    """Keys of the messages of a session's conversations; each stands for its message and everything before it.

    A key covers role, text and tool calls: what stays the same when a client sends a message back.
    """

    def __init__(self) -> None:
        self._recent: list[tuple[Sequence[ChatMessage], list[bytes]]] = []

    def of(self, messages: Sequence[ChatMessage]) -> list[bytes]:
        """The key of each message of a conversation. Objects that stood there in a recent one have theirs already."""
        keys: list[bytes] = []
        others = []
        for known, its_keys in self._recent:
            shared = shared_objects(known, messages)
            if shared > len(keys):
                keys = its_keys[:shared]
            if shared < len(known):
                others.append((known, its_keys))
        for message in messages[len(keys) :]:
            keys.append(key_after(keys, message))
        self._recent = [*others[1 - KEPT :], (messages, keys)]
        return keys


def key_after(keys: Sequence[bytes], message: ChatMessage) -> bytes:
    """The key of a message that follows others.

    Args:
        keys: of those before it.
        message: the next one.
    """
    content = message.content.strip() if message.role == "assistant" else message.content
    parts = [message.role, content]
    for call in message.tool_calls:
        written = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, sort_keys=True)
        parts += [call.name, written]
    digest = blake2b(keys[-1] if keys else b"", digest_size=16)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(encoded))  # the length keeps neighbours apart
        digest.update(encoded)
    return digest.digest()


def shared_objects(one: Sequence[object], other: Sequence[object]) -> int:
    """How many of the first messages are the very same objects."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left is not right:
            return index
    return min(len(one), len(other))


def read_arguments(text: str) -> Mapping[str, Any] | str:
    """Decode the arguments of a tool call; text that is no JSON object stays as it is."""
    try:
        decoded = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text
    return decoded if isinstance(decoded, dict) else text
