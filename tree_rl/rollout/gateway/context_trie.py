"""The token trie of a session, walked by text: which recorded tokens a new prompt begins with.

A node says two things: the text that it stands for in the chat template's rendering, and its token ids. For what an
agent wrote both agree. For a turn of the model the ids are the generated ones, whatever text the template makes of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tree_rl.rollout.gateway.messages import KEPT
from tree_rl.rollout.gateway.rendering import Renderer

LOOK_AHEAD = 200
"""Characters that decide how the tokenizer ends a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedTurn:
    """What a node of the model's own knows beyond its text and ids."""

    call: int
    """Index of the recorded call."""
    raw_text: str
    """What the model wrote and the agent saw."""
    response_ids: tuple[int, ...]
    """All generated ids, the end token and a stop text included."""
    is_whole: bool
    """Whether the node's ids spell `raw_text`; not so where a stop text begins within a token."""
    in_template: Callable[[], tuple[str, str]]
    """The turn as the template writes it at the end of a conversation, and what closes it there. Asked only where a
    text differs from `raw_text`: it costs a rendering."""


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


@dataclass(slots=True)
class Step:
    """A node matched on the way through a text. A prompt makes hundreds, so they are as cheap as Python has them."""

    node: Node
    start: int
    end: int
    num_turns: int
    place: int
    """How many steps stand before it."""
    before: "Step | None"


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """How far recorded tokens carry a text."""

    node: Node
    """The last node whose text is contained whole."""
    turns: tuple[tuple[Node, str], ...]
    """The generated turns that stand on no remembered way, from the last to the first, as the text writes them."""
    cut: tuple[str, tuple[int, ...]] | None
    """Text and ids of the part of a generated turn that follows, if the text leaves the turn in its middle."""
    rest: str
    """What no recorded token covers."""
    way: tuple[Step, ...]
    """From the root to `node`."""
    num_new: int
    """How many of the last steps stand on no remembered way."""


@dataclass(frozen=True, slots=True)
class _Way:
    """Steps that every text takes, or can take, that begins with this one."""

    text: str
    steps: tuple[Step, ...]


class ContextTrie:
    """All contexts of one session.

    Args:
        renderer: tells special tokens and decodes.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._root = Node(parent=None, text="", ids=(), depth=0)
        self._ways: list[_Way] = []

    def match(self, text: str) -> Match:
        """Find the recorded path that a rendering continues.

        Of several, the one with the most turns of the model wins, then the longest, then the latest.

        Args:
            text: a whole rendering.
        """
        root = Step(self._root, 0, 0, 0, 0, None)
        ways = [way for way in self._ways if text.startswith(way.text)]
        known = max(ways, key=lambda way: len(way.steps), default=None)
        stack = [root] if known is None else self._behind(known, text)
        best = root
        while stack:
            step = stack.pop()
            start, num_turns = step.end, step.num_turns
            # Of equals the first, that is the latest child.
            if num_turns > best.num_turns or (num_turns == best.num_turns and start > best.end):
                best = step
            stack += self._steps(step, step.node.children, text)
        way, new = self._way_to(best, known)
        rest = text[best.end :]
        cut = self._cut_turn(best.node, rest)
        return Match(
            node=best.node,
            turns=tuple((step.node, text[step.start : step.end]) for step in new if step.node.turn is not None),
            cut=cut,
            rest=rest if cut is None else rest[len(cut[0]) :],
            way=way,
            num_new=len(new),
        )

    def remember(self, text: str, match: Match, prompt: Node) -> None:
        """Spare later texts that begin like this one the way through what they share with it.

        Args:
            text: of a prompt.
            match: of the text.
            prompt: the node at its end.
        """
        behind: list[Node] = []
        node: Node | None = prompt
        while node is not None and node is not match.node:
            behind.append(node)
            node = node.parent
        steps = list(match.way)
        for node in reversed(behind):
            last = steps[-1]
            steps.append(Step(node, last.end, last.end + len(node.text), last.num_turns, last.place + 1, last))
        # How the next prompt writes the last piece depends on the answer (reasoning may begin in it).
        del steps[-1]
        if len(steps) < 2:
            return
        # What decides that a node ends here: the special token behind it.
        seen = text[: steps[-1].end + len(self._renderer.specials[0])]
        if not all(self._is_decided(step, len(seen)) for step in steps[len(match.way) - match.num_new :]):
            return
        others = [way for way in self._ways if not seen.startswith(way.text)]
        self._ways = [*others[1 - KEPT :], _Way(seen, tuple(steps))]

    def extend(self, match: Match, pieces: Sequence[str], encoded: Sequence[tuple[int, ...]]) -> Node:
        """Add what a match lacks.

        Args:
            match: of a prompt's text.
            pieces: its `rest`, cut.
            encoded: their ids.

        Returns:
            The node at the prompt's end.
        """
        node = match.node
        if match.cut is not None:
            node = self._child(node, *match.cut)
            node.is_open = True
        for text, ids in zip(pieces, encoded, strict=True):
            node = self._child(node, text, ids)
        node.is_open = True
        return node

    def add_turn(self, prompt: Node, *, ids: tuple[int, ...], turn: GeneratedTurn) -> Node:
        """Add a generated turn behind a prompt.

        Args:
            prompt: the node at the prompt's end.
            ids: the generated ids that later prompts contain for it.
            turn: everything else.
        """
        node = Node(parent=prompt, text="", ids=ids, depth=prompt.depth + len(ids), is_open=True, turn=turn)
        prompt.children.append(node)
        return node

    def _steps(self, step: Step, children: Sequence[Node], text: str) -> list[Step]:
        """The nodes behind a step that a text contains."""
        found = []
        for child in children:
            end = self._end_of_match(child, text, step.end)
            if end is not None:
                num_turns = step.num_turns + (child.turn is not None)
                found.append(Step(child, step.end, end, num_turns, step.place + 1, step))
        return found

    def _behind(self, way: _Way, text: str) -> list[Step]:
        """What is left to visit behind a remembered way: its end, and what branches off, in the order of a search."""
        sooner: list[list[Step]] = []
        later: list[Step] = []
        for step, following in zip(way.steps, way.steps[1:], strict=False):
            children = step.node.children
            if len(children) > 1:
                place = children.index(following.node)
                later += self._steps(step, children[:place], text)
                sooner.append(self._steps(step, children[place + 1 :], text))
        return [*later, way.steps[-1], *(branch for branches in reversed(sooner) for branch in branches)]

    def _way_to(self, last: Step, known: _Way | None) -> tuple[tuple[Step, ...], list[Step]]:
        """All steps to the last one, and, in reverse, those that do not stand on a known way."""
        steps = () if known is None else known.steps
        new: list[Step] = []
        step: Step | None = last
        while step is not None and not (step.place < len(steps) and steps[step.place] is step):
            new.append(step)
            step = step.before
        return (*steps[: 0 if step is None else step.place + 1], *reversed(new)), new

    def _is_decided(self, step: Step, num_characters: int) -> bool:
        """Whether so many characters of a text tell which form of a turn it contains."""
        turn = step.node.turn
        return turn is None or step.start + len(turn.raw_text) + len(self._renderer.end_text) <= num_characters

    def _end_of_match(self, node: Node, text: str, position: int) -> int | None:
        if node.turn is not None:
            return self._end_of_turn(node.turn, text, position)
        if not text.startswith(node.text, position):
            return None
        end = position + len(node.text)
        ends_here = node.is_open or end == len(text) or text.startswith(self._renderer.specials, end)
        return end if ends_here else None

    def _end_of_turn(self, turn: GeneratedTurn, text: str, position: int) -> int | None:
        """A turn stands in a text as the model wrote it, or as the template writes it; and it ends there."""
        if not turn.is_whole:
            return None
        if text.startswith(turn.raw_text + self._renderer.end_text, position):
            return position + len(turn.raw_text)
        written, closing = turn.in_template()
        return position + len(written) if text.startswith(written + closing, position) else None

    def _cut_turn(self, node: Node, rest: str) -> tuple[str, tuple[int, ...]] | None:
        """The longest beginning of a turn behind `node` that a text shares as the model wrote it."""
        longest: tuple[int, ...] = ()
        for turn in [child.turn for child in node.children if child.turn is not None]:
            if rest[:1] != turn.raw_text[:1] or not rest:
                continue
            ids = turn.response_ids
            shared = ids[: self._renderer.tokens_within(ids, rest)]
            longest = max(longest, shared, key=len)
        while longest and not self._goes_on_alike(longest, rest):
            longest = longest[:-1]
        return (self._renderer.decode(longest), longest) if longest else None

    def _goes_on_alike(self, ids: tuple[int, ...], rest: str) -> bool:
        """Whether the tokenizer, too, ends a token where `ids` end in `rest`: a cut must not force an odd spelling."""
        last = ids[-1:]
        start = len(self._renderer.decode(ids[:-1]))
        (spelled,) = self._renderer.encode([rest[start : start + LOOK_AHEAD]])
        return spelled[:1] == last

    def _child(self, parent: Node, text: str, ids: tuple[int, ...]) -> Node:
        for child in parent.children:
            if child.turn is None and child.text == text:
                return child
        node = Node(parent=parent, text=text, ids=ids, depth=parent.depth + len(ids))
        parent.children.append(node)
        return node
