"""Chat templates that write only the messages that are new.

Templates go through the messages in a loop. What one round of it writes is decided by its message, its place and a few
values; where the template shows that nothing else can matter, rounds that an earlier rendering has written are taken
from there. All other templates, and all other values, are rendered in full.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Undefined, nodes
from jinja2.filters import FILTERS
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from tree_rl.rollout.gateway.messages import ChatMessage, shared_objects

KEPT = 8
"""Conversations of a session that are remembered: an agent's and its sub-agents'."""
MEMORY = "_tree_rl_memory"
"""Name under which templates get the memory."""
PLAIN = frozenset({str, int, float, bool, type(None)})
PLACES = frozenset({"first", "last", "index", "index0"})
"""Attributes of `loop` that a round's place decides."""
PURE_FILTERS = frozenset(FILTERS) - {"random"}
PURE_FUNCTIONS = frozenset({"raise_exception", "range"})
PURE_NODES = (
    *(nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.AssignBlock, nodes.Scope, nodes.Const),
    *(nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Keyword, nodes.Getattr, nodes.Getitem, nodes.Slice),
    *(nodes.Call, nodes.Filter, nodes.Test, nodes.Compare, nodes.Operand, nodes.CondExpr, nodes.Concat, nodes.Name),
    *(nodes.BinExpr, nodes.UnaryExpr),
)


class NotPureError(Exception):
    """A loop whose rounds may depend on more than is known."""


@dataclass(kw_only=True, slots=True)
class LoopRead:
    """What the body of a loop over messages reads."""

    values: dict[str, set[str] | None] = field(default_factory=dict)
    """Name -> the attributes that are read of it, None if it is read as a whole."""
    ahead: int = 0
    """How many messages after its own a round may read."""
    behind: int = 0
    """How many before."""


def read_by_loop(loop: nodes.For, *, known_functions: frozenset[str]) -> LoopRead:
    """Find what decides the rounds of a loop.

    Args:
        loop: of a template.
        known_functions: names that mean the functions of `PURE_FUNCTIONS`.

    Raises:
        NotPureError: it cannot be told.
    """
    if not isinstance(loop.target, nodes.Name) or loop.test is not None or loop.recursive or loop.else_:
        raise NotPureError
    own = {name.name for name in loop.find_all(nodes.Name) if name.ctx == "store"} - {loop.target.name}
    read = LoopRead()
    for node in loop.body:
        _read(node, loop, own, known_functions, read, is_inner=False)
    return read


def _read(
    node: nodes.Node, loop: nodes.For, own: set[str], functions: frozenset[str], read: LoopRead, *, is_inner: bool
) -> None:
    """Add what a node reads. In an inner loop the name `loop` is that loop's own."""
    if not isinstance(node, PURE_NODES):
        raise NotPureError
    target = loop.target.name if isinstance(loop.target, nodes.Name) else None
    rest: list[nodes.Node] = []
    match node:
        case nodes.Name(name=name, ctx="store"):
            if name in (target, "loop"):
                raise NotPureError
        case nodes.Name(name=name):
            if name == "loop" and not is_inner:
                raise NotPureError
            if name not in (target, "loop"):
                read.values[name] = None
        case nodes.Getattr(node=nodes.Name(name="loop"), attr=attribute):
            if attribute not in PLACES:
                raise NotPureError
        case nodes.Getattr(node=nodes.Name(name=name), attr=attribute) if name != target and name not in own:
            known = read.values.setdefault(name, set())
            if known is not None:
                known.add(attribute)
        case nodes.Getitem(node=nodes.Name() as items, arg=index) if items == loop.iter and not is_inner:
            match index:
                case nodes.Const(value=int() as place) if place >= 0:
                    read.behind = max(read.behind, place)  # from that message on, it is among those before
                case _:
                    offset = _offset(index)
                    read.ahead, read.behind = max(read.ahead, offset), max(read.behind, -offset)
        case nodes.Call(node=nodes.Name(name=name)) if name in functions:
            rest = [*node.args, *node.kwargs]
        case nodes.Filter(name=name) if name not in PURE_FILTERS or node.node is None:
            raise NotPureError
        case nodes.For():
            if node.recursive or node.test is not None or not isinstance(node.target, nodes.Name):
                raise NotPureError
            rest = [node.iter, *node.else_]
            for inner in node.body:
                _read(inner, loop, own, functions, read, is_inner=True)
        case _:
            rest = list(node.iter_child_nodes())
    for child in rest:
        _read(child, loop, own, functions, read, is_inner=is_inner)


def _offset(index: nodes.Node) -> int:
    """Of `loop.index0`, `loop.index0 + 1`, `loop.index0 - 1` and so on from the round's own place."""
    match index:
        case nodes.Getattr(node=nodes.Name(name="loop"), attr="index0"):
            return 0
        case nodes.Add(left=left, right=nodes.Const(value=int() as distance)):
            return _offset(left) + distance
        case nodes.Sub(left=left, right=nodes.Const(value=int() as distance)):
            return _offset(left) - distance
    raise NotPureError


def outer_loops(body: Sequence[nodes.Node]) -> Iterator[nodes.For]:
    """Loops of a template that stand in no other loop, macro or block."""
    for node in body:
        if isinstance(node, nodes.For):
            yield node
        elif isinstance(node, nodes.If):
            yield from outer_loops([*node.body, *node.elif_, *node.else_])


@dataclass(kw_only=True, slots=True)
class _Told:
    """The rounds of a loop in one rendering."""

    values: tuple[Any, ...]
    items: Sequence[Mapping[str, Any]]
    texts: list[str]


class TemplateMemory:
    """What the renderings of a session have written. Messages given to them must never change."""

    def __init__(self) -> None:
        self.in_use = threading.Lock()
        """Held while rendering: long conversations are rendered in threads."""
        self._forms: list[tuple[Sequence[ChatMessage], list[dict[str, Any]]]] = []
        self._told: dict[int, list[_Told]] = {}
        self._now: _Told | None = None

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
        self._remember(site, now)
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

    def _begin(self, read: LoopRead, items: Any, values: list[Any]) -> _Told | None:
        if type(items) is not list or not all(type(item) is dict for item in items):
            return None
        decisive: list[Any] = []
        for value, attributes in zip(values, read.values.values(), strict=True):
            if attributes is not None and type(value) is Namespace:
                read_of_it = [getattr(value, attribute, Undefined()) for attribute in sorted(attributes)]
            else:
                read_of_it = [value]
            for one in read_of_it:
                if type(one) not in PLAIN and type(one) is not Undefined:
                    return None
                # 1 and True are equal and written differently.
                decisive += [type(one), None if type(one) is Undefined else one]
        return _Told(values=tuple(decisive), items=items, texts=[])

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

    def _remember(self, site: int, now: _Told) -> None:
        others = [told for told in self._told.get(site, []) if shared_objects(told.items, now.items) < len(told.items)]
        self._told[site] = [*others[1 - KEPT :], now]
