"""The turns that a session generated, recognised by keys when they come back, and made whole again.

Clients re-serialise what they received: extra fields appear, arguments are spaced differently, null becomes "", the
reasoning field is dropped. Keys see nothing of that. Messages of a recent conversation are not looked at again.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from tree_rl.rollout.gateway.messages import KEPT, ChatMessage, shared_objects


@dataclass(kw_only=True, slots=True)
class _Seen:
    """A conversation."""

    messages: Sequence[ChatMessage]
    """As the agent sent it."""
    keys: list[bytes]
    """Each stands for its message and everything before it: role, text and tool calls."""
    restored: list[ChatMessage]
    """The first messages with the reasoning that they had; the others have to be looked up."""


class OwnTurns:
    """The generated turns of a session."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[ChatMessage]] = {}
        self._looked_up: set[bytes] = set()
        self._recent: list[_Seen] = []

    def restore(self, messages: Sequence[ChatMessage]) -> tuple[tuple[ChatMessage, ...], list[bytes]]:
        """Put back what the session's own turns have lost on their way through the client: the reasoning field.

        Args:
            messages: of a request. Objects that stood at their place in a recent one are known.

        Returns:
            The messages, and the key of each.
        """
        keys: list[bytes] = []
        restored: list[ChatMessage] = []
        others = []
        for seen in self._recent:
            shared = shared_objects(seen.messages, messages)
            if shared > len(keys):
                keys, restored = seen.keys[:shared], seen.restored[:shared]
            if shared < len(seen.messages):
                others.append(seen)
        for message in messages[len(keys) :]:
            keys.append(key_after(keys, message))
        for place in range(len(restored), len(messages)):
            restored.append(self._own(keys[place], messages[place]))
        self._recent = [*others[1 - KEPT :], _Seen(messages=messages, keys=keys, restored=restored)]
        return tuple(restored), keys

    def add(self, keys: Sequence[bytes], message: ChatMessage) -> None:
        """Add a turn.

        Args:
            keys: of the messages before it.
            message: as the agent receives it.
        """
        key = key_after(keys, message)
        self._by_key.setdefault(key, []).append(message)
        if key in self._looked_up:
            # What was found for it, or not found, is no longer the latest.
            self._looked_up.clear()
            for seen in self._recent:
                seen.restored = []

    def _own(self, key: bytes, message: ChatMessage) -> ChatMessage:
        if message.role != "assistant":
            return message
        self._looked_up.add(key)
        alike = [own for own in self._by_key.get(key, []) if message.reasoning in (None, "", own.reasoning)]
        return alike[-1] if alike else message


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
