"""Where each policy branches, computed by hand."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from tree_rl.rollout.branching.policies import Cut, Node, SessionNodes, entropy, fixed, tail, turns, within_budget


def session(number: int, *lengths: int, entropies: Sequence[float] = (), turn: int = 0, **fields: Any) -> SessionNodes:
    """A session whose calls generated so many tokens, each after a tool's result but the first of all.

    A branch has calls of its own from the turn of the cut on.
    """
    given = {"reward": 0.0, "parent": None, "cut": None, **fields}
    ends, nodes = [*accumulate(lengths, initial=given["cut"] or 0)], []
    for index, (start, end) in enumerate(pairwise(ends)):
        value, is_later = entropies[index] if entropies else None, "parent" in fields or index > 0
        nodes.append(Node(start=start, end=end, turn=turn + index, entropy=value, after_tool=is_later))
    turns_ = turn + len(lengths)
    return SessionNodes(session=number, tokens=ends[-1], turns=turns_, nodes=tuple(nodes), **given)


def branch(number: int, parent: int, cut: int, *lengths: int, **fields: Any) -> SessionNodes:
    return session(number, *lengths, parent=parent, cut=cut, **fields)


def places(cuts: list[Cut]) -> list[tuple[int, int, int]]:
    return [(cut.session, cut.token, cut.k) for cut in cuts]


def test_turns_expands_random_turns_of_each_tree() -> None:
    # Two trees. The branch left session 0 at its second turn (token 10): that turn's start belongs to the parent.
    sessions = [session(0, 10, 5, 3), session(1, 4), branch(2, 0, 10, 7, 2, turn=1)]
    drawn = Counter(places(turns(sessions, random.Random(0), expansions=4000)))
    assert set(drawn) == {(0, 0, 1), (0, 10, 1), (0, 15, 1), (2, 17, 1), (1, 0, 1)}
    assert drawn[1, 0, 1] == 4000, "the one turn of the second tree"
    assert all(900 < drawn[place] < 1100 for place in drawn if place[0] != 1), "four turns, all the same"
    # N a tree, one tree after the other.
    assert [cut.session == 1 for cut in turns(sessions, random.Random(0), expansions=2)] == [False, True] * 2
    assert not turns([session(0)], random.Random(0))


def share(sessions: list[SessionNodes], place: tuple[int, int], **options: float) -> float:
    rng = random.Random(1)
    drawn = Counter((cut.session, cut.token) for _ in range(4000) for cut in entropy(sessions, rng, **options))
    return drawn[place] / 4000


def test_entropy_branches_where_a_result_raised_it() -> None:
    # P = p + w (H_t - H_0): 0.5 + 0.2 (2.0 - 1.0) = 0.7, and 0.5 + 0.2 (0.0 - 1.0) = 0.3.
    one = session(0, 10, 10, 10, entropies=(1.0, 2.0, 0.0))
    assert abs(share([one], (0, 10)) - 0.7) < 0.03
    assert abs(share([one], (0, 20)) - 0.3) < 0.03
    assert share([one], (0, 0)) == 0.0, "no tool has spoken yet"
    # The bounds: 0.5 + 2 (2 - 1) and 0.5 + 2 (0 - 1).
    assert places(entropy([one], random.Random(0), weight=2.0, branches=3)) == [(0, 10, 3)]


def test_a_penalty_thins_out_branches_that_follow_each_other_and_sessions_take_turns() -> None:
    # Every try succeeds but for the penalty: the first branches; then 1 - 1.0 * 1 = 0; then l is 0 again.
    one = session(0, 5, 5, 5, 5, entropies=(0.0, 9.0, 9.0, 9.0))
    assert places(entropy([one], random.Random(0), weight=1.0)) == [(0, 5, 1), (0, 10, 1), (0, 15, 1)]
    assert places(entropy([one], random.Random(0), weight=1.0, penalty=1.0)) == [(0, 5, 1), (0, 15, 1)]
    # l = 1 halves the chance: P(branch at 10) = 1/2; at 15 either l = 2, P = 0, or l = 0, P = 1.
    assert abs(share([one], (0, 10), weight=1.0, penalty=0.5) - 0.5) < 0.03
    assert abs(share([one], (0, 15), weight=1.0, penalty=0.5) - 0.5) < 0.03
    # All sessions take their turns together.
    sessions = [session(n, 5, 5 + n, 5, entropies=(0.0, 9.0, 9.0)) for n in range(2)]
    cuts = places(entropy(sessions, random.Random(0), weight=1.0))
    assert cuts == [(0, 5, 1), (1, 5, 1), (0, 10, 1), (1, 11, 1)]


def test_tail_follows_the_table_of_branpo() -> None:
    rng = random.Random(0)

    def first(*rewards_and_turns: tuple[float, int]) -> list[SessionNodes]:
        return [session(n, *[10] * turns_, reward=r) for n, (r, turns_) in enumerate(rewards_and_turns)]

    # All solved: one more last turn each.
    assert places(tail(first((1.0, 3), (1.0, 2)), rng)) == [(0, 20, 1), (1, 10, 1)]
    # 3 of 4 solved, in a mean of 10/3 turns: the long solved one from two turns before its end; a = 3/4, so the others
    # at the last turn.
    sessions = first((1.0, 5), (1.0, 2), (1.0, 3), (0.0, 1))
    assert places(tail(sessions, rng)) == [(0, 30, 5), (1, 10, 2), (2, 20, 2), (3, 0, 2)]
    # 4 of 5 solved, all as long: only the unsolved.
    assert places(tail(first(*[(1.0, 2)] * 4, (0.0, 2)), rng)) == [(4, 10, 2)]
    # None solved: 1, 2, 3 turns before the end, until a branch is solved.
    sessions = first((0.0, 4), (0.0, 1))
    assert places(tail(sessions, rng)) == [(0, 30, 2), (1, 0, 2)]
    sessions += [branch(2, 0, 30, 9, turn=3), branch(3, 0, 30, 9, turn=3), branch(4, 1, 0, 9, turn=0, reward=1.0)]
    assert places(tail(sessions, rng)) == [(0, 20, 2)]
    sessions += [branch(5, 0, 20, 9, turn=2, reward=0.0)]
    assert places(tail(sessions, rng)) == [(0, 10, 2)]
    sessions += [branch(6, 0, 10, 9, turn=1, reward=1.0)]
    assert places(tail(sessions, rng)) == []


def test_fixed_cuts_every_turn_or_every_so_many_tokens() -> None:
    rng = random.Random(0)
    sessions = [session(0, 4, 6, 5), session(1, 3, 9)]
    # VinePPO: K samples of each turn's start but the prompt's; sorted by position.
    assert places(fixed(sessions, rng, branches=9)) == [(1, 3, 9), (0, 4, 9), (0, 10, 9)]
    assert places(fixed(sessions, rng, depth=1)) == [(1, 3, 1), (0, 4, 1)]
    # SPO, TreePO: 15 and 12 tokens in segments of 5. A cut at the very end would leave nothing to sample.
    assert places(fixed(sessions, rng, every_tokens=5, branches=2)) == [(0, 5, 2), (1, 5, 2), (0, 10, 2), (1, 10, 2)]
    assert places(fixed(sessions, rng, every_tokens=5, depth=1)) == [(0, 5, 1), (1, 5, 1)]


def test_fixed_grows_the_whole_tree_round_by_round() -> None:
    # B = 3, depth 2, one call of 14 tokens: 3^2 leaves.
    rng, sessions = random.Random(0), [session(0, 14)]
    for _ in range(2):
        for cut in fixed(sessions, rng, every_tokens=5, branches=2, depth=2):
            for _ in range(cut.k):
                sessions.append(branch(len(sessions), cut.session, cut.token, 14 - cut.token, turn=0))
    assert len(sessions) == 9
    assert Counter(one.cut for one in sessions) == {None: 1, 5: 2, 10: 6}
    assert not fixed(sessions, rng, every_tokens=5, branches=2, depth=2), "every end has its branches"


def test_a_budget_keeps_the_first_cuts_that_fit() -> None:
    sessions = [session(0, 10, 10), session(1, 30)]
    cuts = [Cut(session=0, token=10, k=3), Cut(session=1, token=0), Cut(session=0, token=15)]
    assert within_budget(cuts, sessions, None) == cuts
    # 10 tokens a branch: two of three; the second cut needs 30; the third 5.
    assert places(within_budget(cuts, sessions, 25)) == [(0, 10, 2), (0, 15, 1)]
    assert within_budget(cuts, sessions, -1) == []
