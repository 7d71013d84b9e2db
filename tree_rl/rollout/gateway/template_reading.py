"""What decides the rounds of a template's loop: found in the template itself, once."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from jinja2 import nodes
from jinja2.filters import FILTERS

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


PLACE = "_tree_rl_place"
"""Stands for the place of a message in an analysed search."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRead:
    """What the body of a search reads: a loop over messages from the last to the first that writes nothing."""

    items: str
    """Name of the list of messages."""
    values: tuple[str, ...]
    """Other names."""
    state: str
    """Name of the namespace that carries what was found from round to round."""
    attributes: tuple[str, ...]
    """Of the namespace, that are read or set."""
    decisive: frozenset[str]
    """Those that are read."""


def read_by_search(loop: nodes.For, *, known_functions: frozenset[str]) -> SearchRead:
    """Find what decides the rounds of a search. Its rounds may know their message and its place from the first message.

    Args:
        loop: of a template.
        known_functions: names that mean the functions of `PURE_FUNCTIONS`.

    Raises:
        NotPureError: it is none, or it cannot be told.
    """
    items = _reversed_name(loop.iter)
    search = deepcopy(loop)
    set_names, set_attributes = _set_in_namespaces(search)
    if len(set_names) != 1:
        raise NotPureError
    (state,) = set_names
    _hide_place(search, items)
    read = read_by_loop(search, known_functions=known_functions)
    attributes = read.values.pop(state, set())
    own = {name.name for name in search.find_all(nodes.Name) if name.ctx == "store"}
    used = {name.name for node in search.body for name in node.find_all(nodes.Name)}
    whole = [name for name, known in read.values.items() if known is None]
    if attributes is None or len(whole) != len(read.values) or own & {state, items} or {"loop", items} & used:
        raise NotPureError
    if any(not isinstance(node, nodes.Assign | nodes.If) for node in search.find_all(nodes.Stmt) if node is not search):
        raise NotPureError
    return SearchRead(
        items=items,
        values=tuple(name for name in whole if name != PLACE),
        state=state,
        attributes=tuple(sorted(attributes | set_attributes)),
        decisive=frozenset(attributes),
    )


def _reversed_name(items: nodes.Node) -> str:
    """Of a list that is gone through from the last to the first."""
    match items:
        case nodes.Getitem(
            node=nodes.Name(name=name), arg=nodes.Slice(start=None, stop=None, step=nodes.Neg(node=one))
        ):
            if one == nodes.Const(1):
                return name
    raise NotPureError


def _set_in_namespaces(search: nodes.For) -> tuple[set[str], set[str]]:
    """Names and attributes that a loop sets in namespaces. Names of its own take their place."""
    names, attributes = set(), set()
    for node in search.find_all(nodes.Assign):
        if isinstance(node.target, nodes.NSRef):
            names.add(node.target.name)
            attributes.add(node.target.attr)
            node.target = nodes.Name(f"{PLACE}_{node.target.attr}", "store")
    return names, attributes


def _hide_place(search: nodes.For, items: str) -> None:
    """Give the place of a round's message, counted from the first one, a name."""
    length = nodes.Filter(nodes.Name(items, "load"), "length", [], [], None, None)
    place = nodes.Sub(nodes.Sub(length, nodes.Const(1)), nodes.Getattr(nodes.Name("loop", "load"), "index0", "load"))
    for parent in [search, *search.find_all(nodes.Node)]:
        for name, value in parent.iter_fields():
            if value == place:
                setattr(parent, name, nodes.Name(PLACE, "load"))
            elif isinstance(value, list):
                setattr(parent, name, [nodes.Name(PLACE, "load") if one == place else one for one in value])
