"""Recognises the turns that a session generated when a client sends them back.

Clients change turns: they add fields, reformat arguments, write null as "", trim text and drop reasoning. They also
change the messages before a turn: a clock, cleared tool results, a reminder.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tree_rl.rollout.gateway.protocols.messages import ChatMessage
from tree_rl.rollout.gateway.protocols.tool_results import answered_calls, with_ids_of_calls
from tree_rl.rollout.gateway.tokens.message_keys import joined_key, key_alone

MOST_COMPARED = 64
"""Most turns that are compared when the messages before a turn have changed: the latest ones."""


@dataclass(kw_only=True, slots=True, eq=False)
class Restored:
    """A request's messages, and the session's turns among them. Lists of calls are in the messages' order."""

    messages: Sequence[ChatMessage]
    """Messages with the reasoning that clients drop, and tool results with the ids of their calls."""
    keys: tuple[bytes, ...]
    """`key_alone` of each message."""
    key: bytes
    """Key of all messages; empty without messages."""
    turns_key: bytes
    """Key of the list of the assistant's messages."""
    own_calls: list[int] = field(default_factory=list)
    """Calls that generated turns among the messages."""
    guessed: list[int] = field(default_factory=list)
    """Calls of `own_calls` that were chosen, as the latest, among several turns with the same text."""
    edited: list[int] = field(default_factory=list)
    """Calls whose turns are here with a different text or different tool calls."""
    moved: list[int] = field(default_factory=list)
    """Calls of `own_calls` whose turns follow other messages than when they were generated."""
    unclear: list[int] = field(default_factory=list)
    """Latest call of each group that may have generated a turn after changed messages; none was chosen."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnTurn:
    """A generated turn's message, to recognise it in requests."""

    message: ChatMessage
    history: Restored
    """Messages before it: those of its prompt."""
    agent: str
    call: int
    key: bytes
    """`key_alone` of its message."""
    turns_key: bytes
    """Key of the assistant's messages up to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sent:
    """A request's messages and their keys."""

    messages: Sequence[ChatMessage]
    agent: str
    alone: tuple[bytes, ...]
    keys: tuple[bytes, ...]
    """Key of the messages up to each message."""
    turns_keys: tuple[bytes, ...]
    """Key of the assistant's messages up to each message."""
    repeated_ids: frozenset[str]
    """Ids of more than one tool call, which identify none."""


class OwnTurns:
    """The generated turns of a session."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[OwnTurn]] = {}
        """Turns by the key of the messages up to them."""
        self._by_text: dict[bytes, list[OwnTurn]] = {}
        """Turns by the key of their message alone."""
        self._by_id: dict[str, OwnTurn] = {}
        """Turns by the id of a tool call."""
        self._of_call: dict[int, OwnTurn] = {}
        self._latest_after: dict[bytes, OwnTurn] = {}
        """Latest turn after each history, by its key."""
        self._sent: dict[bytes, ChatMessage] = {}
        self._alone: dict[bytes, bytes] = {}
        """One shared copy of each `key_alone`, to save memory."""
        self._went_on: dict[int, set[bytes]] = {}
        """Keys of the messages that followed a turn which shares its text with others, by the turn's call."""

    def restore(self, messages: Sequence[ChatMessage], *, agent: str = "main") -> Restored:
        """Restore the reasoning that clients drop from the session's turns.

        Among turns with the same text, chooses the one with the client's tool-call ids, else one that is in the history
        of a later turn here, else one of the same agent: the one that this conversation already continued, or the
        latest that no conversation continued. If the messages before a turn have changed, it is found by its tool-call
        ids, by the turns before it, or by the message before it; if several match, none is chosen.
        """
        sent = self._with_keys(messages, agent)
        found = Restored(
            messages=messages,
            keys=sent.alone,
            key=sent.keys[-1] if messages else b"",
            turns_key=sent.turns_keys[-1] if messages else b"",
        )
        restored, later = list(messages), None
        # Backwards, because a turn knows the turns before it.
        for index in reversed(range(len(messages))):
            if messages[index].role == "assistant" and (own := self._find(sent, index, later, found)) is not None:
                restored[index] = own.message
                later = own
        for calls in (found.own_calls, found.guessed, found.edited, found.moved, found.unclear):
            calls.reverse()
        restored = with_ids_of_calls(restored, answered_calls(messages))
        for index, message in enumerate(restored):
            if message.role != "assistant":
                # Clients send every message with every call, so we keep one copy.
                known = self._sent.setdefault(sent.keys[index], message)
                restored[index] = known if known == message else message
        found.messages = tuple(restored)
        return found

    def add(self, history: Restored, message: ChatMessage, *, agent: str, call: int) -> None:
        key = key_alone(message)
        turns_key = joined_key(history.turns_key, key)
        turn = OwnTurn(message=message, history=history, agent=agent, call=call, key=key, turns_key=turns_key)
        self._by_key.setdefault(joined_key(history.key, key), []).append(turn)
        self._by_text.setdefault(key, []).append(turn)
        self._by_id.update((called.id, turn) for called in message.tool_calls)
        self._of_call[call] = self._latest_after[history.key] = turn

    def of_call(self, call: int) -> OwnTurn:
        return self._of_call[call]

    def _with_keys(self, messages: Sequence[ChatMessage], agent: str) -> _Sent:
        key = turns_key = b""
        alone, keys, turns_keys = [], [], []
        for message in messages:
            own_key = key_alone(message)
            alone.append(self._alone.setdefault(own_key, own_key))
            key = joined_key(key, own_key)
            turns_key = joined_key(turns_key, own_key) if message.role == "assistant" else turns_key
            keys.append(key)
            turns_keys.append(turns_key)
        ids = Counter(call.id for message in messages for call in message.tool_calls)
        return _Sent(
            messages=messages,
            agent=agent,
            alone=tuple(alone),
            keys=tuple(keys),
            turns_keys=tuple(turns_keys),
            repeated_ids=frozenset(id_ for id_, count in ids.items() if count > 1),
        )

    def _find(self, sent: _Sent, index: int, later: OwnTurn | None, found: Restored) -> OwnTurn | None:
        """Find the session's turn that a message is, and update `found`; `later` follows in the conversation."""
        message, key = sent.messages[index], sent.keys[index]
        named = self._named(sent, index)
        same_text = [own for own in self._by_key.get(key, ()) if _may_be(own, message)]
        own: OwnTurn | None = None
        if named is not None and named.key == sent.alone[index] and _may_be(named, message):
            own = named
        elif same_text:
            own, is_guess = self._choose(same_text, sent, index, later)
            found.guessed += [own.call] if is_guess else []
        elif named is None:
            fitting = self._after_changed(sent, index, later)
            if len({one.message.reasoning for one in fitting}) > 1:
                found.unclear.append(fitting[-1].call)
                return None
            own = fitting[-1] if fitting else None
        if own is None:
            replaced = named or self._latest_after.get(sent.keys[index - 1] if index else b"")
            found.edited += [] if replaced is None else [replaced.call]
            return None
        found.own_calls.append(own.call)
        found.moved += [] if own in self._by_key.get(key, ()) else [own.call]
        return own

    def _named(self, sent: _Sent, index: int) -> OwnTurn | None:
        """The turn that made a message's tool calls, found by their ids."""
        ids = [call.id for call in sent.messages[index].tool_calls]
        turns = {own.call: own for id_ in ids if (own := self._by_id.get(id_)) and id_ not in sent.repeated_ids}
        return next(iter(turns.values())) if len(turns) == 1 else None

    def _choose(
        self, same_text: Sequence[OwnTurn], sent: _Sent, index: int, later: OwnTurn | None
    ) -> tuple[OwnTurn, bool]:
        """Choose among turns with the same text after the same messages; True if it is a guess."""
        if len(same_text) == 1:
            return same_text[0], False
        message = sent.messages[index]
        following = sent.keys[index + 1] if index + 1 < len(sent.keys) else b""
        sent_ids = [call.id for call in message.tool_calls]
        certain = (
            [own for own in same_text if sent_ids and [call.id for call in own.message.tool_calls] == sent_ids]
            or [own for own in same_text if later is not None and own.call in later.history.own_calls]
            or [own for own in same_text if (message.reasoning or "").strip()]
        )
        same_agent = [own for own in same_text if own.agent == sent.agent] or same_text
        # Without a sign: the turn that this conversation continued before, else the latest that none continued.
        went_on = [own for own in same_agent if following in self._went_on.get(own.call, ())]
        unanswered = [own for own in same_agent if own.call not in self._went_on]
        own = (certain or went_on or unanswered or same_agent)[-1]
        if following:
            self._went_on.setdefault(own.call, set()).add(following)
        # Turns with the same text and reasoning differ only in their tokens.
        is_guess = not certain and len({one.message.reasoning for one in same_agent}) > 1
        return own, is_guess

    def _after_changed(self, sent: _Sent, index: int, later: OwnTurn | None) -> list[OwnTurn]:
        """The turns that a message may be although the messages before it have changed, the likeliest last.

        The text is not enough evidence, as an agent may have written it. The turns before it or the message before it
        must be the same, or a later turn of the conversation must have it in its history.
        """
        before = later.history.own_calls if later is not None else []
        front = sent.alone[index - 1] if index and _says_something(sent.messages[index - 1]) else None
        led = [self._of_call[call] for call in before[-MOST_COMPARED:]]

        def has_same_turns(own: OwnTurn) -> bool:
            return own.turns_key == sent.turns_keys[index]

        def has_same_front(own: OwnTurn) -> bool:
            return own.history.keys[-1:] == (front,)

        def is_likely(own: OwnTurn) -> bool:
            has_turns = has_same_turns(own) and (own.history.own_calls or _has_similar_history(own, sent, index))
            return own in led or has_same_front(own) or bool(has_turns)

        same_text = self._by_text.get(sent.alone[index], [])[-MOST_COMPARED:]
        candidates = {own.call: own for own in (*led, *same_text) if own.key == sent.alone[index]}
        fitting = [
            own for _, own in sorted(candidates.items()) if _may_be(own, sent.messages[index]) and is_likely(own)
        ]
        if len(fitting) < 2:
            return fitting
        shared = {own.call: len(set(sent.alone[:index]).intersection(own.history.keys)) for own in fitting}
        most = max(shared.values())
        signs: Iterable[Callable[[OwnTurn], bool]] = (
            lambda own: has_same_turns(own) and own.history.keys[-1:] == sent.alone[:index][-1:],
            lambda own: own.call in before[-1:],
            lambda own: own.call in before,
            lambda own: shared[own.call] == most,
            lambda own: own.agent == sent.agent,
        )
        for sign in signs:
            fitting = [own for own in fitting if sign(own)] or fitting
        return fitting


def _may_be(own: OwnTurn, message: ChatMessage) -> bool:
    """True if a message has the turn's reasoning or none."""
    return (message.reasoning or "").strip() in ("", (own.message.reasoning or "").strip())


def _says_something(message: ChatMessage) -> bool:
    return message.role in ("user", "tool") and bool(message.content.strip())


def _has_similar_history(own: OwnTurn, sent: _Sent, index: int) -> bool:
    """True if the messages before a conversation's first generated turn have changed only a little."""
    messages = own.history.messages
    given = {key for key, one in zip(own.history.keys, messages, strict=True) if _says_something(one)}
    if not given.isdisjoint(sent.alone[:index]):
        return True
    if not messages or not index or messages[-1].role != sent.messages[index - 1].role:
        return False
    known, now = (set(re.findall(r"\w+", one.content)) for one in (messages[-1], sent.messages[index - 1]))
    return 2 * len(known & now) >= min(len(known), len(now)) > 0
