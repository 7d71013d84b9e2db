"""The token trie of a session: which recorded tokens a new prompt begins with.

A node has text, as the chat template writes it, and token ids. What an agent wrote has the ids of its text. A turn of
the model keeps the generated ids, however the template spells it.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest

from tree_rl.rollout.gateway.long_work import CHARACTERS_PER_TOKEN, SPELL
from tree_rl.rollout.gateway.tokens.rendering import Renderer

LOOK_AHEAD = 200
"""Characters that decide how the tokenizer ends a token."""
CLOSEST_TURNS = 8
"""Turns behind one prompt that are compared token by token with an edited one."""
ODD_TOKENS = 64
"""A turn that the tokenizer spells otherwise for so long is not cut: its text is tokenized anew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedTurn:
    """What a node knows about the turn of the model that it stands for."""

    call: int
    """Index of the recorded call."""
    raw_text: str
    """What the model wrote and the agent saw."""
    response_ids: tuple[int, ...]
    """All generated ids, the end token and a stop text included."""
    is_whole: bool
    """True if the node's ids spell `raw_text`; not so where a stop text begins within a token."""
    forms: Callable[[], Iterable[tuple[str, str]]]
    """The turn as the template writes it, at the end of a conversation and further up, and what closes it there. Costs
    renderings, so it is called only where a text differs from `raw_text`."""


@dataclass(kw_only=True, slots=True, eq=False)
class Node:
    """A piece of context."""

    parent: "Node | None"
    text: str
    """What it stands for in a rendering; empty for a turn, which has two forms."""
    ids: tuple[int, ...]
    depth: int
    """Tokens up to its end."""
    is_open: bool = False
    """Ordinary text may follow: a prompt's end, or a turn that was cut. Other pieces end at a special token."""
    turn: GeneratedTurn | None = None
    """None for context that no model wrote here."""
    children: list["Node"] = field(default_factory=list)
    prompt_ids: tuple[int, ...] | None = None
    """Token ids from the start to the node's end, where a prompt that ended here has put them together."""

    def path_ids(self) -> tuple[int, ...]:
        """Token ids from the start to the node's end."""
        behind: list[Node] = []
        node: Node | None = self
        while node is not None and node.prompt_ids is None:
            behind.append(node)
            node = node.parent
        known = () if node is None or node.prompt_ids is None else node.prompt_ids
        return known + tuple(token for one in reversed(behind) for token in one.ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """How far recorded tokens carry a text."""

    node: Node
    """The last node whose text is contained whole."""
    turns: tuple[tuple[Node, str], ...]
    """The generated turns up to `node`, in order, as the text writes them."""
    cut: tuple[str, tuple[int, ...]] | None
    """Text and ids of the beginning of a generated turn, if the text leaves the turn in its middle."""
    rest: str
    """What no recorded token covers."""


@dataclass(slots=True)
class _Step:
    """A node matched on the path through a text."""

    node: Node
    end: int
    """Characters of the text up to the node's end."""
    num_turns: int
    """Turns of the model up to the node, itself included."""
    before: "_Step | None"
    is_opening: bool = False
    """A prompt's end without the reasoning that the template opens answers with: only a turn may follow."""


class ContextTrie:
    """All contexts of one session."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._root = Node(parent=None, text="", ids=(), depth=0)
        self._most_turns = 1
        """Turns behind one prompt."""
        self._longest_turn = 0
        """Tokens."""

    def searched_characters(self, rendered: int) -> int:
        """Characters that a search for a prompt of so many may read, by their cost.

        Each turn behind one prompt may have to be rendered, and the closest ones to be decoded.
        """
        compared = min(self._most_turns, CLOSEST_TURNS) * self._longest_turn
        return rendered * self._most_turns + SPELL * CHARACTERS_PER_TOKEN * compared

    def match(self, text: str) -> Match:
        """Find the recorded path that a rendering continues.

        Of several, the one with the most turns of the model wins, then the longest, then the latest.
        """
        best = _Step(self._root, 0, 0, None)
        stack = [best]
        while stack:
            step = stack.pop()
            # Of equals the first one stays: the latest child.
            is_longer = step.num_turns == best.num_turns and step.end > best.end
            if not step.is_opening and (step.num_turns > best.num_turns or is_longer):
                best = step
            for child in step.node.children:
                if step.is_opening and child.turn is None:
                    continue
                end = self._end_of_match(child, text, step)
                if end is not None:
                    stack.append(_Step(child, end, step.num_turns + (child.turn is not None), step))
                elif (end := self._end_of_opening(child, text, step.end)) is not None:
                    stack.append(_Step(child, end, step.num_turns, step, is_opening=True))
        rest = text[best.end :]
        cut = self._cut_turn(best.node, rest)
        return Match(
            node=best.node,
            turns=_turns_up_to(best, text),
            cut=cut,
            rest=rest if cut is None else rest[len(cut[0]) :],
        )

    def extend(self, match: Match, pieces: Sequence[str], encoded: Sequence[tuple[int, ...]]) -> Node:
        """Add what a match lacks: the pieces of its `rest`, with their ids. Returns the node at the prompt's end."""
        node = match.node
        if match.cut is not None:
            node = self._child(node, *match.cut)
            node.is_open = True
        for text, ids in zip(pieces, encoded, strict=True):
            node = self._child(node, text, ids)
        node.is_open = True
        return node

    def add_turn(self, prompt: Node, *, ids: tuple[int, ...], turn: GeneratedTurn) -> Node:
        """Add a generated turn behind a prompt; later prompts contain `ids` for it."""
        node = Node(parent=prompt, text="", ids=ids, depth=prompt.depth + len(ids), is_open=True, turn=turn)
        prompt.children.append(node)
        self._most_turns = max(self._most_turns, len(prompt.children))
        self._longest_turn = max(self._longest_turn, len(turn.response_ids))
        return node

    def _end_of_match(self, node: Node, text: str, before: _Step) -> int | None:
        position = before.end
        if node.turn is not None:
            # Behind a prompt that opens reasoning, what the model wrote begins there.
            may_be_raw = not (before.is_opening and self._renderer.opens_reasoning)
            return self._end_of_turn(node.turn, text, position, may_be_raw=may_be_raw)
        if not text.startswith(node.text, position):
            return None
        end = position + len(node.text)
        ends_here = node.is_open or end == len(text) or text.startswith(self._renderer.specials, end)
        return end if ends_here else None

    def _end_of_opening(self, node: Node, text: str, position: int) -> int | None:
        """Where a prompt's end ends if the text lacks its opened reasoning, as templates write earlier turns."""
        dropped = self._renderer.dropped_opening
        if node.turn is not None or not dropped or not node.text.endswith(dropped):
            return None
        opening = node.text.removesuffix(dropped)
        return position + len(opening) if text.startswith(opening, position) else None

    def _end_of_turn(self, turn: GeneratedTurn, text: str, position: int, *, may_be_raw: bool) -> int | None:
        """Where a turn ends that stands in a text as the model wrote it, or as the template writes it."""
        if not turn.is_whole:
            return None
        end = position + len(turn.raw_text)
        if may_be_raw and text.startswith(turn.raw_text, position) and text.startswith(self._renderer.turn_ends, end):
            return end
        for written, closing in turn.forms():
            if text.startswith(written + closing, position):
                return position + len(written)
        return None

    def _cut_turn(self, node: Node, rest: str) -> tuple[str, tuple[int, ...]] | None:
        """The longest beginning of a turn behind `node` that a text spells as the model did."""
        turns = [child.turn for child in node.children if child.turn is not None]
        alike = [turn for turn in turns if rest and rest[:1] == turn.raw_text[:1]]
        longest: tuple[int, ...] = ()
        for turn in nlargest(CLOSEST_TURNS, alike, key=lambda turn: _num_alike(turn.raw_text, rest)):
            shared = turn.response_ids[: self._renderer.tokens_within(turn.response_ids, rest)]
            longest = max(longest, shared, key=len)
        longest = longest[: self._common_end(longest, rest)]
        return (self._renderer.decode(longest), longest) if longest else None

    def _common_end(self, ids: tuple[int, ...], rest: str) -> int:
        """How many of `ids` end where the tokenizer ends a token in `rest`: a cut elsewhere forces an odd spelling.

        0 if the last `ODD_TOKENS` all end elsewhere.
        """
        base = max(0, len(ids) - ODD_TOKENS)
        while base and (self._renderer.decode(ids[:base])).endswith("\ufffd"):
            base -= 1
        base_characters = len(self._renderer.decode(ids[:base]))
        for count in range(len(ids), base, -1):
            start = base_characters + len(self._renderer.decode(ids[base : count - 1]))
            (spelled,) = self._renderer.encode([rest[start : start + LOOK_AHEAD]])
            if spelled[:1] == ids[count - 1 : count]:
                return count
        return 0

    def _child(self, parent: Node, text: str, ids: tuple[int, ...]) -> Node:
        for child in parent.children:
            if child.turn is None and child.text == text:
                return child
        node = Node(parent=parent, text=text, ids=ids, depth=parent.depth + len(ids))
        parent.children.append(node)
        return node


def _num_alike(first: str, second: str) -> int:
    """Characters with which both texts begin."""
    lengths = range(min(len(first), len(second)) + 1)
    return bisect_left(lengths, True, key=lambda length: first[:length] != second[:length]) - 1


def _turns_up_to(last: _Step, text: str) -> tuple[tuple[Node, str], ...]:
    turns = []
    step = last
    while step.before is not None:
        if step.node.turn is not None:
            turns.append((step.node, text[step.before.end : step.end]))
        step = step.before
    return tuple(reversed(turns))
