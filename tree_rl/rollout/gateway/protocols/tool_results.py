"""Finds the call that each tool result answers. Clients rename ids, repeat them, or send none."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage

CallPlace = tuple[int, int]
"""Index of a message, and of a call in it."""


def answered_calls(messages: Sequence[ChatMessage]) -> list[CallPlace | None]:
    """The call that each message answers; None if it is no tool result, or answers no call.

    A result belongs to the last turn with calls, or to an earlier call without a result that has its id. In a turn the
    id decides, in any order. The remaining results, those with a tool's name first, take the remaining calls: by name,
    else in order.
    """
    answered: list[CallPlace | None] = [None] * len(messages)
    by_id: dict[str, CallPlace] = {}  # the latest call with each id
    unanswered: dict[str, CallPlace] = {}  # those without a result
    turns = {place for place, message in enumerate(messages) if message.tool_calls}
    for turn, end in pairwise(sorted({0, *turns, len(messages)})):
        calls = _Waiting(messages[turn].tool_calls)
        late = []
        for place in range(turn, end):
            message, sent = messages[place], messages[place].tool_call_id
            if message.role == "tool" and sent:
                index = calls.take((sent, message.name), (sent, None))
                answered[place] = unanswered.pop(sent, None) if index is None else (turn, index)
            if message.role == "tool" and answered[place] is None:
                late.append(place)
        by_id.update((call.id, (turn, index)) for index, call in enumerate(calls.called) if call.id)
        for place in sorted(late, key=lambda place: not messages[place].name):
            index = calls.take((None, messages[place].name), (None, None))
            known = by_id.get(messages[place].tool_call_id or "")
            answered[place] = known if index is None else (turn, index)
        unanswered.update((calls.called[index].id, (turn, index)) for index in calls.waiting)
    return answered


def with_ids_of_calls(messages: Sequence[ChatMessage], answered: Sequence[CallPlace | None]) -> list[ChatMessage]:
    """Give each tool result the id of the call that it answers."""
    named = list(messages)
    for place, call in enumerate(answered):
        if call is not None:
            called = messages[call[0]].tool_calls[call[1]].id or None
            if called != named[place].tool_call_id:
                named[place] = replace(named[place], tool_call_id=called)
    return named


class _Waiting:
    """Calls of a turn without a result, in order."""

    def __init__(self, called: Sequence[CalledTool]) -> None:
        self.called = called
        self.waiting = dict.fromkeys(range(len(called)))
        self._queues: dict[tuple[str | None, str | None], deque[int]] = {}
        for index, call in enumerate(called):
            for key in ((call.id, call.name), (call.id, None), (None, call.name), (None, None)):
                self._queues.setdefault(key, deque()).append(index)

    def take(self, *keys: tuple[str | None, str | None]) -> int | None:
        """Take the first call that matches a key (id, name), trying the keys in order; None in a key matches all."""
        for key in keys:
            queue = self._queues.get(key, deque())
            while queue and queue[0] not in self.waiting:
                queue.popleft()
            if queue:
                del self.waiting[queue[0]]
                return queue.popleft()
        return None
