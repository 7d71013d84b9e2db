"""A session's own turns, found again when a client sends them back.

Clients change the form of what they received: they add fields, space arguments otherwise, write null as "" and drop the
reasoning. A message's key ignores all of that.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b

from tree_rl.rollout.gateway.protocols.messages import ChatMessage


class OwnTurns:
    """The generated turns of a session."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[ChatMessage]] = {}
        self._sent: dict[bytes, ChatMessage] = {}

    def restore(self, messages: Sequence[ChatMessage]) -> tuple[tuple[ChatMessage, ...], bytes]:
        """Put back the reasoning that own turns lost on their way through the client.

        Returns the messages, and the key of the last one.
        """
        key = b""
        restored = []
        for message in messages:
            key = key_after(key, message)
            if message.role == "assistant":
                restored.append(self._own(key, message))
            else:
                # Clients send every message with every call. One copy of it is kept.
                known = self._sent.setdefault(key, message)
                restored.append(known if known == message else message)
        return tuple(restored), key

    def add(self, key: bytes, message: ChatMessage) -> None:
        """Add a turn behind the message with this key."""
        self._by_key.setdefault(key_after(key, message), []).append(message)

    def _own(self, key: bytes, message: ChatMessage) -> ChatMessage:
        alike = [own for own in self._by_key.get(key, []) if message.reasoning in (None, "", own.reasoning)]
        return alike[-1] if alike else message


def key_after(before: bytes, message: ChatMessage) -> bytes:
    """Key of a message: a digest of its role, text and tool calls, and of all messages before it.

    Args:
        before: key of the message before it, empty for the first.
    """
    content = message.content.strip() if message.role == "assistant" else message.content
    parts = [message.role, content]
    for call in message.tool_calls:
        written = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, sort_keys=True)
        parts += [call.name, written]
    # The lengths say where each part ends.
    text = "".join([repr([len(part) for part in parts]), *parts])
    return blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
