"""A walk through the trie that begins where an earlier one came ends where a walk from the root ends."""

from typing import Any

import pytest
from gateway_harness import CHATML, build_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.rollout.gateway.context_trie import ContextTrie, GeneratedTurn, Match, Step
from tree_rl.rollout.gateway.messages import KEPT
from tree_rl.rollout.gateway.rendering import Renderer

OPEN, END = "<|im_start|>", "<|im_end|>"
ASK = f"{END}\n{OPEN}assistant\n"
WORDS = st.lists(st.sampled_from(["a", "b", END, f"{END}\n{OPEN}user\nb", ASK]), max_size=4).map("".join)
"""Few words, so that texts often share beginnings; control tokens among them, as models can write them, too."""
SAID = st.tuples(WORDS, WORDS, st.sampled_from(["", END]))
"""A turn as the model wrote it, as the template writes it, and what closes it there."""
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), WORDS),
        st.tuples(st.just("answer"), SAID),
        st.tuples(st.just("answer and go on"), SAID),
        st.tuples(st.just("return to"), st.integers(0, 20)),
        st.tuples(st.just("cut"), st.integers(0, 60)),
    ),
    max_size=24,
)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(build_tokenizer(CHATML), {})


class Walker:
    """A trie to which each prompt is matched twice: by its memory, and from the root."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.trie = ContextTrie(renderer)
        self.recalled = 0

    def ask(self, text: str) -> Any:
        match = self.trie.match(text)
        ways, self.trie._ways = self.trie._ways, []
        whole = self.trie.match(text)
        self.trie._ways = ways
        assert seen(match) == seen(whole)
        assert match.turns == whole.turns[: len(match.turns)]
        self.recalled += len(match.way) - match.num_new
        assert whole.num_new == len(whole.way)
        pieces = self.renderer.pieces(match.rest)
        node = self.trie.extend(match, pieces, self.renderer.encode(pieces))
        self.trie.remember(text, match, node)
        return node

    def answer(self, node: Any, raw: str, written: str, closing: str = END) -> None:
        turn = GeneratedTurn(
            call=0, raw_text=raw, response_ids=(1,), is_whole=True, in_template=lambda: (written, closing)
        )
        self.trie.add_turn(node, ids=(1,), turn=turn)


def seen(match: Match) -> tuple[Any, ...]:
    way = [(id(step.node), step.start, step.end, step.num_turns, step.place) for step in match.way]
    return id(match.node), match.cut, match.rest, way


def walk(renderer: Renderer, steps: list[tuple[Any, ...]]) -> None:
    walker = Walker(renderer)
    text = f"{OPEN}user\nq{ASK}"
    node, asked = walker.ask(text), [text]
    for kind, value in steps:
        match kind:
            case "ask":
                text += f"{value}{ASK}"
            case "answer":
                walker.answer(node, *value)
                continue
            case "answer and go on":
                walker.answer(node, *value)
                text += f"{value[1]}{ASK}"
            case "return to":
                text = asked[value % len(asked)]
            case "cut":
                text = text[: len(text) - value] or text
        node = walker.ask(text)
        asked.append(text)


def test_a_remembered_way_ends_where_a_walk_from_the_root_ends(renderer: Renderer) -> None:
    @given(STEPS)
    @settings(max_examples=400)
    def check(steps: list[tuple[Any, ...]]) -> None:
        walk(renderer, steps)

    check()


def test_a_turn_that_the_model_wrote_longer_than_the_template_is_decided_by_what_follows(renderer: Renderer) -> None:
    """The template's short form is found first. The next text contains the long form, which comes first."""
    walker = Walker(renderer)
    text = f"{OPEN}user\nq{ASK}"
    walker.answer(walker.ask(text), f"a{END}\n{OPEN}user\nb{ASK}long", "a")
    walker.ask(f"{text}a{END}\n{OPEN}user\nb{ASK}")
    walker.ask(f"{text}a{END}\n{OPEN}user\nb{ASK}long{ASK}")


@pytest.mark.parametrize("branches", [(0,), (1,), (0, 1), (1, 0), (0, 0, 1, 1)])
@pytest.mark.parametrize("is_first", [True, False])
def test_of_equally_good_ways_the_first_and_latest_branch_wins(
    renderer: Renderer, branches: tuple[int, ...], is_first: bool
) -> None:
    """Turns that cover as much as a remembered way, in front of its own nodes and behind them."""
    walker = Walker(renderer)
    text, rest = f"{OPEN}user\nq{ASK}", f"{END}\n{OPEN}user\nb{ASK}"
    node = walker.ask(text)
    places = [(node, ""), (node.parent, f"{OPEN}assistant\n")]

    def branch() -> None:
        for place, start in [places[number] for number in branches]:
            walker.answer(place, "another", f"{start}a{rest}", "")

    if is_first:
        branch()
    walker.answer(node, "a", "a")
    walker.trie.remember(f"{text}a{rest}", *_asked(walker, f"{text}a{rest}"))
    branch()
    walker.ask(f"{text}a{rest}")
    walker.ask(f"{text}a{rest}b{ASK}")


def _asked(walker: Walker, text: str) -> tuple[Match, Any]:
    """A prompt's own pieces behind the turn `a`, whatever else the text may be made of."""
    turn = next(child for child in walker.trie._root.children[0].children[0].children[0].children[::-1] if child.turn)
    start = len(text) - len(f"{END}\n{OPEN}user\nb{ASK}")
    steps = [Step(walker.trie._root, 0, 0, 0, 0, None)]
    for node in walker.trie._root.children[0], *_only_children(walker.trie._root.children[0], 2), turn:
        width = len(node.text) or 1
        last = steps[-1]
        steps.append(Step(node, last.end, last.end + width, last.num_turns + bool(node.turn), len(steps), last))
    assert steps[-1].end == start
    match = Match(node=turn, turns=(), cut=None, rest=text[start:], way=tuple(steps), num_new=len(steps))
    pieces = walker.renderer.pieces(match.rest)
    return match, walker.trie.extend(match, pieces, walker.renderer.encode(pieces))


def _only_children(node: Any, count: int) -> list[Any]:
    return [] if not count else [node.children[0], *_only_children(node.children[0], count - 1)]


def test_a_later_answer_to_an_old_prompt_is_found_behind_a_remembered_way(renderer: Renderer) -> None:
    walker = Walker(renderer)
    text = f"{OPEN}user\nq{ASK}"
    node = walker.ask(text)
    longer = f"{text}a{END}\n{OPEN}user\nr{END}\n{OPEN}assistant\n"
    walker.ask(longer)
    assert not walker.trie.match(longer).turns
    walker.answer(node, "a", "a")
    walker.ask(f"{longer}b{END}\n{OPEN}assistant\n")
    (found,) = walker.trie.match(f"{longer}c{END}\n{OPEN}assistant\n").turns
    assert found[1] == "a"


def test_only_new_steps_are_walked_and_only_some_ways_are_kept(renderer: Renderer) -> None:
    walker = Walker(renderer)
    for agent in range(2 * KEPT):
        text = f"{OPEN}user\n{agent}{END}\n{OPEN}assistant\n"
        for _ in range(20):
            walker.answer(walker.ask(text), "a", "a")
            text += f"a{END}\n{OPEN}user\nb{END}\n{OPEN}assistant\n"
        assert walker.trie.match(text).num_new <= 6
    assert len(walker.trie._ways) == KEPT
