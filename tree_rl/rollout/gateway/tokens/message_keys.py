"""Keys of messages, which do not depend on how a client formats or orders the JSON that it sends back."""

import json
import math
import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from tree_rl.rollout.gateway.protocols.messages import ChatMessage

NOT_AS_JAVASCRIPT = re.compile(r"\d[.eE]|\d{16}")
"""Pattern of numbers that JavaScript may write differently (it also matches in strings)."""


def key_alone(message: ChatMessage) -> bytes:
    """Key of a message without its context: a digest of role, text and tool calls, without reasoning and ids."""
    content = message.content.strip() if message.role == "assistant" else message.content
    parts = [message.role, content]
    for call in message.tool_calls:
        parts += [call.name, call.arguments if isinstance(call.arguments, str) else _normal_form(call.arguments)]
    # The lengths make the concatenation unambiguous.
    return _digest("".join([repr([len(part) for part in parts]), *parts]).encode("utf-8", "surrogatepass"))


def joined_key(before: bytes, key: bytes) -> bytes:
    """Key of a list of messages, from the key of the list without its last message and `key_alone` of that one."""
    return _digest(before + key)


def _digest(written: bytes) -> bytes:
    return blake2b(written, digest_size=16).digest()


def _normal_form(arguments: Mapping[str, Any]) -> str:
    """Arguments as canonical JSON. Clients in JavaScript only have floats: they write 1.0 as 1 and round integers."""
    written = json.dumps(arguments, sort_keys=True)
    if NOT_AS_JAVASCRIPT.search(written) is None:
        return written
    return json.dumps(json.loads(written, parse_int=_number, parse_float=_number), sort_keys=True)


def _number(written: str) -> float | int | str:
    number = float(written)
    # Beyond the range of floats, only the digits can be compared.
    return written if math.isinf(number) else int(number) if number.is_integer() else number
