"""Keys of messages: the same however a client spaces, orders or writes what it sends back."""

import json
import math
import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from tree_rl.rollout.gateway.protocols.messages import ChatMessage

NOT_AS_JAVASCRIPT = re.compile(r"\d[.eE]|\d{16}")
"""Numbers of JSON that JavaScript may write in another way; text may have them, too."""


def key_after(before: bytes, message: ChatMessage) -> bytes:
    """Key of a message: a digest of its role, text and tool calls, and of all messages before it.

    Args:
        before: key of the message before it, empty for the first.
    """
    return joined_key(before, key_alone(message))


def key_alone(message: ChatMessage) -> bytes:
    """Key of a message wherever it stands: a digest of its role, text and tool calls, without reasoning and ids."""
    content = message.content.strip() if message.role == "assistant" else message.content
    parts = [message.role, content]
    for call in message.tool_calls:
        parts += [call.name, call.arguments if isinstance(call.arguments, str) else _normal_form(call.arguments)]
    # The lengths say where each part ends.
    return _digest("".join([repr([len(part) for part in parts]), *parts]).encode("utf-8", "surrogatepass"))


def joined_key(before: bytes, key: bytes) -> bytes:
    """Key of a row of messages: that of the row without its last one, joined with the last one's own key."""
    return _digest(before + key)


def _digest(written: bytes) -> bytes:
    return blake2b(written, digest_size=16).digest()


def _normal_form(arguments: Mapping[str, Any]) -> str:
    """JSON that is the same however a client has spaced, ordered or written it.

    JavaScript, the language of many clients, knows floats alone: it writes 1.0 as 1, and rounds long integers.
    """
    written = json.dumps(arguments, sort_keys=True)
    if NOT_AS_JAVASCRIPT.search(written) is None:
        return written
    return json.dumps(json.loads(written, parse_int=_number, parse_float=_number), sort_keys=True)


def _number(written: str) -> float | int | str:
    number = float(written)
    # Beyond the range of floats, digits are all that is left to compare.
    return written if math.isinf(number) else int(number) if number.is_integer() else number
