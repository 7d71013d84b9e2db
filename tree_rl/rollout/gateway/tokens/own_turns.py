"""A session's own turns, found again when a client sends them back.

Clients change the form of what they received: they add fields, space arguments otherwise, write null as "", trim and
drop the reasoning. A message's key ignores all of that.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from tree_rl.rollout.gateway.protocols.messages import ChatMessage

NOT_AS_JAVASCRIPT = re.compile(r"\d[.eE]|\d{16}")
"""In JSON, numbers that JavaScript may write in another way; text may have them, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTurn:
    """A generated turn."""

    message: ChatMessage
    history: tuple[ChatMessage, ...]
    """The messages of its prompt, with their reasoning."""
    agent: str
    """Who asked for it."""
    call: int
    """Index of the recorded call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A request's messages as the session knows them."""

    messages: tuple[ChatMessage, ...]
    """With the reasoning that clients drop."""
    key: bytes
    """Of the last message; empty without messages."""
    own_calls: tuple[int, ...]
    """Calls that generated turns among them, in order."""
    guessed: tuple[int, ...]
    """Those of `own_calls` that were taken for the latest of several turns that read alike."""
    edited: tuple[int, ...]
    """Calls whose turns stand here with other text or other tool calls."""


class OwnTurns:
    """The generated turns of a session."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[OwnTurn]] = {}
        self._of_call: dict[int, OwnTurn] = {}
        self._behind: dict[bytes, OwnTurn] = {}
        """The latest turn behind each history."""
        self._sent: dict[bytes, ChatMessage] = {}
        self._went_on: dict[int, set[bytes]] = {}
        """Calls with turns that read alike -> keys of the messages that came behind each."""

    def restore(self, messages: Sequence[ChatMessage], *, agent: str = "main") -> Restored:
        """Put back the reasoning that own turns lost on their way through the client.

        Of turns that read alike, the one with the client's tool-call ids is meant, else the one that leads to a later
        turn of the conversation, else one of the same agent: the one that this conversation continued before, or the
        latest that none has continued.
        """
        key, keys = b"", []
        for message in messages:
            key = key_after(key, message)
            keys.append(key)
        restored = list(messages)
        calls: list[int] = []
        guessed: list[int] = []
        edited: list[int] = []
        leads_on: OwnTurn | None = None
        # Backwards: a turn knows the history that it was generated behind.
        for index in reversed(range(len(messages))):
            message = messages[index]
            if message.role != "assistant":
                # Clients send every message with every call. One copy of it is kept.
                known = self._sent.setdefault(keys[index], message)
                restored[index] = known if known == message else message
                continue
            expected = None if leads_on is None else leads_on.history[index]
            following = keys[index + 1] if index + 1 < len(keys) else b""
            own, is_guess = self._own(keys[index], message, expected, agent, following)
            if own is None:
                replaced = self._behind.get(keys[index - 1] if index else b"")
                edited += [] if replaced is None else [replaced.call]
                continue
            leads_on = own
            restored[index] = own.message
            calls.append(own.call)
            guessed += [own.call] if is_guess else []
        return Restored(
            messages=tuple(restored),
            key=key,
            own_calls=tuple(reversed(calls)),
            guessed=tuple(reversed(guessed)),
            edited=tuple(reversed(edited)),
        )

    def add(self, behind: Restored, message: ChatMessage, *, agent: str, call: int) -> None:
        """Add a turn that was generated behind these messages."""
        turn = OwnTurn(message=message, history=behind.messages, agent=agent, call=call)
        self._by_key.setdefault(key_after(behind.key, message), []).append(turn)
        self._of_call[call] = self._behind[behind.key] = turn

    def of_call(self, call: int) -> OwnTurn:
        """The turn that a recorded call generated."""
        return self._of_call[call]

    def _own(
        self, key: bytes, message: ChatMessage, expected: ChatMessage | None, agent: str, following: bytes
    ) -> tuple[OwnTurn | None, bool]:
        """The turn that a message is, and whether another one would have fitted as well."""
        sent = (message.reasoning or "").strip()
        alike = [own for own in self._by_key.get(key, []) if sent in ("", (own.message.reasoning or "").strip())]
        if len(alike) < 2:
            return (alike[0] if alike else None), False
        sent_ids = [call.id for call in message.tool_calls]
        certain = (
            [own for own in alike if sent_ids and [call.id for call in own.message.tool_calls] == sent_ids]
            or [own for own in alike if own.message is expected]
            or [own for own in alike if sent]
        )
        same_agent = [own for own in alike if own.agent == agent] or alike
        own = certain[-1] if certain else self._likeliest(same_agent, following)
        if following:
            self._went_on.setdefault(own.call, set()).add(following)
        # Turns that say and think the same differ in their tokens alone.
        is_guess = not certain and len({one.message.reasoning for one in same_agent}) > 1
        return own, is_guess

    def _likeliest(self, alike: Sequence[OwnTurn], following: bytes) -> OwnTurn:
        """Of turns that nothing tells apart: clients continue each of several siblings, and ask again."""
        went_on = [own for own in alike if following in self._went_on.get(own.call, ())]
        return (went_on or [own for own in alike if own.call not in self._went_on] or alike)[-1]


def key_after(before: bytes, message: ChatMessage) -> bytes:
    """Key of a message: a digest of its role, text and tool calls, and of all messages before it.

    Args:
        before: key of the message before it, empty for the first.
    """
    content = message.content.strip() if message.role == "assistant" else message.content
    parts = [message.role, content]
    for call in message.tool_calls:
        parts += [call.name, call.arguments if isinstance(call.arguments, str) else _normal_form(call.arguments)]
    # The lengths say where each part ends.
    text = "".join([repr([len(part) for part in parts]), *parts])
    return blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


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
