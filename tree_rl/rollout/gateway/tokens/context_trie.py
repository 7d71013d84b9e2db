"""The token trie of a session: finds the recorded tokens with which a new prompt starts.

A node has a text, as the chat template renders it, and token ids. For an agent's text they are the tokenizer's, for a
turn of the model they are the generated ids, however the template renders it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import chain

from tree_rl.rollout.gateway.long_work import CHARACTERS_PER_TOKEN, TOKENIZE
from tree_rl.rollout.gateway.tokens.call_format import shared_length
from tree_rl.rollout.gateway.tokens.rendering import INCOMPLETE_BYTES, Renderer

LOOK_AHEAD = 200
"""Number of characters that decide where the tokenizer ends a token."""
CLOSEST_TURNS = 8
"""Most turns after one prompt that are compared token by token with an edited turn."""
ODD_TOKENS = 64
"""Number of tokens that are searched for a place to cut a turn; without one its text is tokenized again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedTurn:
    """A generated turn's tokens and text, to match renderings."""

    call: int
    raw_text: str
    """Decoded turn without its end token, or up to the stop text."""
    response_ids: tuple[int, ...]
    """All generated ids, including the end token or a stop text."""
    is_whole: bool
    """True if the node's ids decode to `raw_text`; False if a stop text begins inside a token."""
    forms: Callable[[], Iterable[tuple[str, str]]]
    """Returns (turn, closing text) as the template renders them at the end and in the middle of a conversation. Needs
    renderings, so it is called only if a text differs from `raw_text`."""


@dataclass(kw_only=True, slots=True, eq=False)
class Node:
    """A piece of context."""

    parent: "Node | None"
    text: str
    """Its text in a rendering; empty for a turn, which has two forms."""
    ids: tuple[int, ...]
    depth: int
    """Number of tokens up to its end."""
    is_open: bool = False
    """True if ordinary text may follow: for a prompt's end and a cut turn. Other pieces end at a special token."""
    turn: GeneratedTurn | None = None
    """The model's turn; None for other context."""
    children: list["Node"] = field(default_factory=list)

    def path_ids(self) -> tuple[int, ...]:
        """Token ids from the start to the node's end."""
        path, node = [self.ids], self.parent
        while node is not None:
            path.append(node.ids)
            node = node.parent
        return tuple(chain.from_iterable(reversed(path)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """The part of a text that recorded tokens cover."""

    node: Node
    """Last node that the text contains completely."""
    turns: tuple[tuple[Node, str], ...]
    """Generated turns up to `node` in order, each with its form in the text."""
    cut: tuple[str, tuple[int, ...]] | None
    """Text and ids of a generated turn's prefix, if the text deviates inside the turn."""
    rest: str
    """Text that no recorded token covers."""


@dataclass(slots=True)
class _Step:
    """A node matched on the path through a text."""

    node: Node
    end: int
    """Number of characters of the text up to the node's end."""
    turns: tuple[tuple[Node, str], ...] = ()
    """Generated turns up to the node, as in `Match`."""
    is_opening: bool = False
    """True for a prompt's end without the reasoning with which the template starts answers: only a turn may follow."""


class ContextTrie:
    """All contexts of one session."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._root = Node(parent=None, text="", ids=(), depth=0)
        self._most_turns = 1
        """Most turns after one prompt."""
        self._longest_turn = 0
        """Most tokens of a turn."""

    def searched_characters(self, rendered: int) -> int:
        """Cost, in characters read, of a search for a prompt of `rendered` characters.

        Each turn after one prompt may have to be rendered, and the closest ones to be decoded.
        """
        compared = min(self._most_turns, CLOSEST_TURNS) * self._longest_turn
        return rendered * self._most_turns + TOKENIZE * CHARACTERS_PER_TOKEN * compared

    def match(self, text: str) -> Match:
        """Find the recorded path that a rendering continues: with the most turns, then the longest, then the latest."""
        best = _Step(self._root, 0)
        stack = [best]
        while stack:
            step = stack.pop()
            # On a tie the first match wins, which is the latest child, because the stack reverses their order.
            if not step.is_opening and (len(step.turns), step.end) > (len(best.turns), best.end):
                best = step
            for child in step.node.children:
                if step.is_opening and child.turn is None:
                    continue
                end = self._end_of_match(child, text, step)
                if end is not None:
                    own = () if child.turn is None else ((child, text[step.end : end]),)
                    stack.append(_Step(child, end, step.turns + own))
                elif (end := self._end_of_opening(child, text, step.end)) is not None:
                    stack.append(_Step(child, end, step.turns, is_opening=True))
        rest = text[best.end :]
        cut = self._cut_turn(best.node, rest)
        return Match(node=best.node, turns=best.turns, cut=cut, rest=rest if cut is None else rest[len(cut[0]) :])

    def extend(self, match: Match, pieces: Sequence[str], encoded: Sequence[tuple[int, ...]]) -> Node:
        """Add the pieces of a match's `rest` with their ids, and return the node at the prompt's end."""
        node = match.node
        if match.cut is not None:
            node = self._child(node, *match.cut)
            node.is_open = True
        for text, ids in zip(pieces, encoded, strict=True):
            node = self._child(node, text, ids)
        node.is_open = True
        return node

    def add_turn(self, prompt: Node, *, ids: tuple[int, ...], turn: GeneratedTurn) -> Node:
        """Add a generated turn after a prompt. Later prompts that contain it will have its `ids`."""
        node = Node(parent=prompt, text="", ids=ids, depth=prompt.depth + len(ids), is_open=True, turn=turn)
        prompt.children.append(node)
        self._most_turns = max(self._most_turns, len(prompt.children))
        self._longest_turn = max(self._longest_turn, len(turn.response_ids))
        return node

    def _end_of_match(self, node: Node, text: str, before: _Step) -> int | None:
        position = before.end
        if node.turn is not None:
            # After a prompt that opens reasoning, the model's text continues the reasoning.
            may_be_raw = not (before.is_opening and self._renderer.opens_reasoning)
            return self._end_of_turn(node.turn, text, position, may_be_raw=may_be_raw)
        if not text.startswith(node.text, position):
            return None
        end = position + len(node.text)
        ends_here = node.is_open or end == len(text) or text.startswith(self._renderer.specials, end)
        return end if ends_here else None

    def _end_of_opening(self, node: Node, text: str, position: int) -> int | None:
        """The end of a prompt without its opening reasoning, which templates drop from earlier turns; None if none."""
        dropped = self._renderer.dropped_opening
        if node.turn is not None or not dropped or not node.text.endswith(dropped):
            return None
        opening = node.text.removesuffix(dropped)
        return position + len(opening) if text.startswith(opening, position) else None

    def _end_of_turn(self, turn: GeneratedTurn, text: str, position: int, *, may_be_raw: bool) -> int | None:
        """The end of a turn in a text, in the model's or the template's form; None if the text has neither."""
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
        """The longest prefix, in text and ids, of a turn after `node` with which a text starts."""
        turns = [child.turn for child in node.children if child.turn is not None]
        similar = [turn for turn in turns if rest and rest[:1] == turn.raw_text[:1]]
        longest: tuple[int, ...] = ()
        for turn in nlargest(CLOSEST_TURNS, similar, key=lambda turn: shared_length(turn.raw_text, rest)):
            shared = turn.response_ids[: self._renderer.tokens_within(turn.response_ids, rest)]
            longest = max(longest, shared, key=len)
        longest = longest[: self._common_end(longest, rest)]
        return (self._renderer.decode(longest), longest) if longest else None

    def _common_end(self, ids: tuple[int, ...], rest: str) -> int:
        """The largest number of `ids` after which the tokenizer also ends a token in `rest`.

        A cut elsewhere would force unusual tokens after it. 0 if none of the last `ODD_TOKENS` ends so.
        """
        last = max(0, len(ids) - ODD_TOKENS)
        bases = range(last, max(-1, last - INCOMPLETE_BYTES - 1), -1)
        base = next((base for base in bases if not self._renderer.decode(ids[:base]).endswith("\ufffd")), None)
        if base is None:
            return 0
        base_characters = len(self._renderer.decode(ids[:base]))
        for count in range(len(ids), base, -1):
            start = base_characters + len(self._renderer.decode(ids[base : count - 1]))
            (spelled,) = self._renderer.encode([rest[start : start + LOOK_AHEAD]])
            # Ids up to here may end within a character, which `rest` then has and their text lacks.
            if spelled[:1] == ids[count - 1 : count] and rest.startswith(self._renderer.decode(ids[:count])):
                return count
        return 0

    def _child(self, parent: Node, text: str, ids: tuple[int, ...]) -> Node:
        for child in parent.children:
            if child.turn is None and child.text == text:
                return child
        node = Node(parent=parent, text=text, ids=ids, depth=parent.depth + len(ids))
        parent.children.append(node)
        return node
