"""Chat messages in one form for both APIs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEPT = 8
"""Conversations of a session that are remembered: an agent's and its sub-agents'."""


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
