"""Policies that choose where finished sessions of one prompt branch: pure functions of statistics of their model calls.

A position in a session counts its generated tokens, call after call. A branch keeps the tokens before its cut and
continues with new ones. The first sessions of a prompt are verl's `rollout.n`.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

SOLVED = 0.8
"""Reward from which BranPO counts a session as solved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One model call at which a session can branch: nothing else of the session ran meanwhile."""

    start: int
    """Position of the first token of the call that the session generated itself."""
    end: int
    """Position after its last token."""
    turn: int
    """Index of the call in the session."""
    entropy: float | None = None
    """Sum of -log p of its first 20 tokens, divided by the log of the vocabulary's size; None without log-probs.

    ARPO's code sums the entropies of the ten likeliest tokens at each position. -log p of a sampled token is an
    unbiased estimate of the entropy over all tokens."""
    after_tool: bool = False
    """True if the call is the first to see a tool's result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionNodes:
    """One finished session of a prompt."""

    session: int
    """Its number."""
    reward: float
    tokens: int
    """Number of generated tokens, those that it shares with its parent included."""
    turns: int
    """Number of model calls, shared ones included."""
    nodes: tuple[Node, ...]
    parent: int | None = None
    """The session that it branched from; None for a first one."""
    cut: int | None = None
    """Position at which it left its parent; None for a first session."""

    def is_new(self, position: int) -> bool:
        """True if a cut here is not the same as a cut of the parent."""
        return self.cut is None or position > self.cut


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """`k` new branches that keep a session's generated tokens before position `token`."""

    session: int
    token: int
    k: int = 1


Policy = Callable[..., list[Cut]]
"""`(sessions, rng, **options) -> cuts`, called once per round with all sessions of the prompt, branches included."""


def turns(sessions: Sequence[SessionNodes], rng: random.Random, *, expansions: int = 2) -> list[Cut]:
    """Expand random turns of every tree, as Tree-GRPO does.

    M trees (`rollout.n`), N = `expansions` nodes a tree and round, L = `rounds`: a prompt gets M (1 + N L) sessions. A
    node is drawn with replacement from the root and all turns that are no leaf; the branch samples the next turn again
    and continues to the end. So each turn's start is a candidate, the first (the root) included.

    Source: arXiv 2509.21240; its code draws by `random.choices` in `TreeNode.get_expand_node`. It then keeps K random
    leaves a tree; here all are kept.
    """
    root_of = _roots(sessions)
    starts: dict[int, list[Cut]] = {}
    for one, node in _own_nodes(sessions):
        starts.setdefault(root_of[one.session], []).append(Cut(session=one.session, token=node.start))
    # One of each tree, then the next of each: a budget must not end in the first tree.
    return [rng.choice(tree) for _ in range(expansions) for tree in starts.values()]


def entropy(
    sessions: Sequence[SessionNodes],
    rng: random.Random,
    *,
    weight: float = 0.2,
    probability: float = 0.5,
    branches: int = 1,
    penalty: float = 0.0,
) -> list[Cut]:
    """Branch after tool results that left the model less certain than the question did, as ARPO and AEPO do.

    At the first call after each tool result, each of `branches` tries (ARPO's beam size minus 1) succeeds with

        P = clip(p + w (H_t - H_0), 0, 1) max(0, 1 - penalty l)

    H_t is the entropy at the start of this call, H_0 at the start of the session's first, p `probability`, w `weight`.
    l counts the results directly before this one at which the session branched. ARPO has `penalty` 0.

    Source: arXiv 2507.19849, whose code branches if clip(rand - w (H_t - H_0), 0, 1) <= p, which has this probability.
    It measures H_t at the call that made the tool call; here, as in the paper, at the call that sees the result.
    AEPO, arXiv 2510.14545, multiplies by 1 minus a penalty that grows linearly with l; its slope is an option here.
    AEPO's choice of the number of first sessions is not made.
    """
    root_of = _roots(sessions)
    first = {one.session: node.entropy for one in sessions for node in one.nodes if node.turn == 0}
    streak = Counter({one.session: int(one.parent is not None) for one in sessions})
    cuts = []
    # All sessions turn by turn, as if they ran together: a budget must not end in the first session.
    for one, node in sorted(_own_nodes(sessions), key=lambda found: (found[1].turn, found[0].session)):
        root = first.get(root_of[one.session])
        if not node.after_tool or node.entropy is None or root is None:
            continue
        chance = min(1.0, max(0.0, probability + weight * (node.entropy - root)))
        chance *= max(0.0, 1.0 - penalty * streak[one.session])
        k = sum(rng.random() < chance for _ in range(branches))
        streak[one.session] = streak[one.session] + 1 if k else 0
        if k:
            cuts.append(Cut(session=one.session, token=node.start, k=k))
    return cuts


def tail(sessions: Sequence[SessionNodes], rng: random.Random) -> list[Cut]:
    """Sample the last turns of sessions again, more often the less the prompt is decided, as BranPO does.

    With a the share of solved first sessions, r a session's reward, T its turns and T' the mean turns of the solved:

        if                                        branches   turns from the end, round by round
        1/2 < a < 1, r solved, T - T' >= 0.1      5          2
        a = 1                                     1          1
        a < 1/2, r not solved                     2          1, 2, 3
        a <= 3/4 or r not solved                  2          1, 2
        otherwise                                 0

    A later round takes place only if no branch of the session changed whether it is solved, so it needs `rounds` 3. A
    session with fewer turns branches at its first.

    Source: arXiv 2602.03719, its code `agent_branch_engine.py`, which counts the session itself as a branch. Readings:
    the code samples a session's branches in turn and keeps only the first that changed the reward or, where the session
    is solved and 1/2 < a < 1, the length; here all run at once and are kept, and a length ends the rounds no sooner.
    """
    first = [one for one in sessions if one.parent is None]
    solved = mean(one.reward >= SOLVED for one in first)
    turns_of_solved = [one.turns for one in first if one.reward >= SOLVED]
    mean_turns = mean(turns_of_solved) if turns_of_solved else 0.0
    cuts = []
    for one in first:
        is_solved = one.reward >= SOLVED
        if 0.5 < solved < 1 and is_solved and one.turns - mean_turns >= 0.1:
            k, ends = 5, [2]
        elif solved == 1:
            k, ends = 1, [1]
        elif solved < 0.5 and not is_solved:
            k, ends = 2, [1, 2, 3]
        elif solved <= 0.75 or not is_solved:
            k, ends = 2, [1, 2]
        else:
            continue
        tried = [other for other in sessions if other.parent == one.session]
        done = len({other.cut for other in tried})
        if done >= len(ends) or any((other.reward >= SOLVED) != is_solved for other in tried):
            continue
        turn = max(0, one.turns - ends[done])
        cuts += [Cut(session=one.session, token=node.start, k=k) for node in one.nodes if node.turn == turn]
    return cuts


def fixed(
    sessions: Sequence[SessionNodes],
    rng: random.Random,
    *,
    branches: int = 1,
    every_tokens: int | None = None,
    depth: int | None = None,
) -> list[Cut]:
    """Branch at every turn, or at every `every_tokens` generated tokens, with the same number of branches.

    * VinePPO (arXiv 2410.01679): V(s) is the mean reward of K = `branches` sessions from each turn's start s; one
      round. K samples of the prompt are the first sessions.
    * SPO (arXiv 2505.23564): a tree with B children at the end of each segment of `every_tokens` tokens. `branches` is
      B - 1, as the session itself is one child, and `depth` and `rounds` are the number of segment ends: a round also
      cuts the branches of the round before, and B^depth leaves come of one first session.
    * TreePO (arXiv 2508.17445): the same tree with the fixed width B of its `fixed_avg` rule, and segments until the
      budget is spent. Its fallback, a restart in finished sessions, is not made.

    Cuts are sorted by position, so a budget thins out the ends.
    """
    taken = {(one.parent, one.cut) for one in sessions}
    found = []
    for one in sessions:
        if every_tokens is None:
            ends = {node.start for node in one.nodes if 0 < node.turn <= (depth or node.turn)}
        else:
            step, last = every_tokens, (depth or one.tokens) * every_tokens
            ends = {p for node in one.nodes for p in range(step, min(node.end, last + 1), step) if p >= node.start}
        found += [(p, one.session) for p in ends if one.is_new(p) and (one.session, p) not in taken]
    return [Cut(session=session, token=position, k=branches) for position, session in sorted(found)]


POLICIES: Mapping[str, Policy] = {"turns": turns, "entropy": entropy, "tail": tail, "fixed": fixed}


def within_budget(cuts: Sequence[Cut], sessions: Sequence[SessionNodes], tokens: int | None) -> list[Cut]:
    """The first cuts whose branches generate at most so many tokens, if each is as long as the session that it leaves.

    `tokens` is what is left of the prompt's budget; None has no limit.
    """
    if tokens is None:
        return list(cuts)
    length = {one.session: one.tokens for one in sessions}
    kept = []
    for cut in cuts:
        cost = max(1, length[cut.session] - cut.token)
        k = min(cut.k, max(0, tokens) // cost)
        tokens -= k * cost
        if k:
            kept.append(Cut(session=cut.session, token=cut.token, k=k))
    return kept


def _roots(sessions: Sequence[SessionNodes]) -> dict[int, int]:
    """The first session of each session's tree. Parents come before their branches."""
    root_of: dict[int, int] = {}
    for one in sessions:
        root_of[one.session] = one.session if one.parent is None else root_of[one.parent]
    return root_of


def _own_nodes(sessions: Sequence[SessionNodes]) -> list[tuple[SessionNodes, Node]]:
    """Nodes at whose start no parent could be cut."""
    return [(one, node) for one in sessions for node in one.nodes if one.is_new(node.start)]
