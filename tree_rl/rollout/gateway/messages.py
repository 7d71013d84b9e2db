"""Chat messages in one form for both APIs, and keys by which a message is recognised when it comes back.

Clients re-serialise what they received: extra fields appear, arguments are spaced differently, null becomes "", the
reasoning field is dropped. Keys see nothing of that.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any


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


class History:
    """Keys of the messages of a conversation; each stands for its message and everything before it.

    A key covers role, text and tool calls: what stays the same when a client sends a message back.
    """

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=16)

    def append(self, message: ChatMessage) -> bytes:
        """Go on by a message and return its key."""
        content = message.content.strip() if message.role == "assistant" else message.content
        self._add(message.role)
        self._add(content)
        for call in message.tool_calls:
            self._add(call.name)
            self._add(call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, sort_keys=True))
        return self._digest.digest()

    def key_after(self, message: ChatMessage) -> bytes:
        """The key that a message would have; the history stays as it is."""
        ahead = History()
        ahead._digest = self._digest.copy()
        return ahead.append(message)

    def _add(self, text: str) -> None:
        encoded = text.encode("utf-8", "surrogatepass")
        self._digest.update(b"%d:" % len(encoded))  # the length keeps neighbours apart
        self._digest.update(encoded)


def read_arguments(text: str) -> Mapping[str, Any] | str:
    """Decode the arguments of a tool call; text that is no JSON object stays as it is."""
    try:
        decoded = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text
    return decoded if isinstance(decoded, dict) else text
