"""Chat templates that write only the messages that are new.

Templates go through the messages in a loop. What one round of it writes is decided by its message, its place and a few
values; where the template shows that nothing else can matter, rounds that an earlier rendering has written are taken
from there. All other templates, and all other values, are rendered in full.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jinja2 import Undefined
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from tree_rl.rollout.gateway.messages import KEPT, ChatMessage, shared_objects
from tree_rl.rollout.gateway.template_reading import LoopRead, SearchRead

MEMORY = "_tree_rl_memory"
"""Name under which templates get the memory."""
PLAIN = frozenset({str, int, float, bool, type(None)})
UNSET: Any = object()
"""In place of what is undefined: all of it is alike."""


@dataclass(kw_only=True, slots=True)
class _Told:
    """The rounds of a loop in one rendering."""

    values: tuple[Any, ...]
    items: Sequence[Mapping[str, Any]]
    texts: list[str]


@dataclass(kw_only=True, slots=True)
class _Searched:
    """A search in one rendering."""

    values: tuple[Any, ...]
    items: Sequence[Mapping[str, Any]]
    states: list[tuple[Any, ...]]
    """The namespace before the round of each message, from the first message on; empty for one that was not reached."""
    found: tuple[Any, ...]
    """The namespace behind all of them."""

    def tells(self, place: int, before: tuple[Any, ...], read: SearchRead) -> bool:
        """Whether a search with another namespace before the same message ends with the same one."""
        own = self.states[place]
        return bool(own) and all(
            # What is only set is the same if it is set: then it has changed.
            one == other or (attribute not in read.decisive and other != found)
            for attribute, one, other, found in zip(read.attributes, before, own, self.found, strict=True)
        )


Kept = TypeVar("Kept", bound=_Told | _Searched)


class TemplateMemory:
    """What the renderings of a session have written. Messages given to them must never change."""

    def __init__(self) -> None:
        self.in_use = threading.Lock()
        """Held while rendering: long conversations are rendered in threads."""
        self._forms: list[tuple[Sequence[ChatMessage], list[dict[str, Any]]]] = []
        self._told: dict[int, list[_Told]] = {}
        self._now: _Told | None = None
        self._searched: dict[int, list[_Searched]] = {}
        self._search: _Searched | None = None

    def forms(self, messages: Sequence[ChatMessage], *, inline_reasoning: bool) -> list[dict[str, Any]]:
        """The messages as templates read them: for messages that stood there before, the same objects again."""
        best: list[dict[str, Any]] = []
        others = []
        for known, forms in self._forms:
            shared = shared_objects(known, messages)
            if shared > len(best):
                best = forms[:shared]
            if shared < len(known):
                others.append((known, forms))
        best += [message.for_template(inline_reasoning=inline_reasoning) for message in messages[len(best) :]]
        self._forms = [*others[1 - KEPT :], (messages, best)]
        return best

    def recall(self, site: int, read: LoopRead, loop: LoopContext, items: Any, values: list[Any]) -> str | None:
        """Called in every round: what this and the next rounds write, which are then left out; None to write it."""
        place = loop.index0
        if place == 0:
            self._now = self._begin(read, items, values)
        now = self._now
        if now is None or place != read.behind:
            return None
        known, count = self._longest(site, now, read)
        _keep(self._told, site, now)
        if known is None or count <= place:
            return None
        texts = known.texts[place:count]
        now.texts += texts
        for _ in range(len(texts) - 1):
            next(loop)
        return "".join(texts)

    def keep(self, text: str) -> str:
        """Called with what a round has written."""
        if self._now is not None:
            self._now.texts.append(text)
        return text

    def recall_search(
        self, site: int, read: SearchRead, loop: LoopContext, items: Any, state: Any, values: list[Any]
    ) -> bool:
        """Called in every round of a search: whether what it will find is known; then the namespace has it."""
        if loop.index0 == 0:
            self._search = self._begin_search(items, state, values)
        now = self._search
        if now is None:
            return False
        place = len(now.items) - 1 - loop.index0
        before = _plain([getattr(state, attribute, UNSET) for attribute in read.attributes])
        if before is None:
            self._search = None
            return False
        now.states[place] = before
        for known in self._searched.get(site, []):
            if known.values != now.values or place >= len(known.items) or not known.tells(place, before, read):
                continue
            if shared_objects(known.items, now.items) > place:
                now.states[:place], now.found = known.states[:place], known.found
                for attribute, (_, value) in zip(read.attributes, known.found, strict=True):
                    state[attribute] = value
                _keep(self._searched, site, now)
                return True
        return False

    def end_search(self, site: int, read: SearchRead, loop: LoopContext, state: Any) -> None:
        """Called behind every round of a search."""
        if self._search is not None and loop.last:
            found = _plain([getattr(state, attribute, UNSET) for attribute in read.attributes])
            # What is undefined cannot be set again.
            if found is not None and all(value is not UNSET for _, value in found):
                self._search.found = found
                _keep(self._searched, site, self._search)

    def _begin_search(self, items: Any, state: Any, values: list[Any]) -> _Searched | None:
        decisive = _plain(values)
        if decisive is None or type(state) is not Namespace or type(items) is not list:
            return None
        return _Searched(values=decisive, items=items, states=[()] * len(items), found=())

    def _begin(self, read: LoopRead, items: Any, values: list[Any]) -> _Told | None:
        if type(items) is not list or not all(type(item) is dict for item in items):
            return None
        of_all: list[Any] = []
        for value, attributes in zip(values, read.values.values(), strict=True):
            if attributes is not None and type(value) is Namespace:
                of_all += [getattr(value, attribute, UNSET) for attribute in sorted(attributes)]
            else:
                of_all.append(value)
        decisive = _plain(of_all)
        return None if decisive is None else _Told(values=decisive, items=items, texts=[])

    def _longest(self, site: int, now: _Told, read: LoopRead) -> tuple[_Told | None, int]:
        """The rendering that begins like the one under way, and how many of its rounds hold again."""
        best, count = None, 0
        for told in self._told.get(site, []):
            if told.values != now.values:
                continue
            # A round knows whether it is the last, and may look ahead.
            alike = shared_objects(told.items, now.items) - max(1, read.ahead)
            if min(alike, len(told.texts)) > count:
                best, count = told, min(alike, len(told.texts))
        return best, count


def _keep(kept: dict[int, list[Kept]], site: int, now: Kept) -> None:
    """In place of what the conversation under way begins with."""
    others = [known for known in kept.get(site, []) if shared_objects(known.items, now.items) < len(known.items)]
    kept[site] = [*others[1 - KEPT :], now]


def _plain(values: Sequence[Any]) -> tuple[Any, ...] | None:
    """Types and values, which can be compared; None if one of them says more than its value."""
    decisive: list[Any] = []
    for value in values:
        if type(value) is Undefined:
            value = UNSET
        elif type(value) not in PLAIN and value is not UNSET:
            return None
        # 1 and True are equal and written differently.
        decisive.append((type(value), value))
    return tuple(decisive)
