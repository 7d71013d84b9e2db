"""The tree of one prompt as estimators see it: nodes, the leaves below them, and steps.

A leaf is a session: one attempt with one outcome, and a row for each of its branches. A node is a run of tokens through
which the same leaves pass; a fork inside a leaf (stripped reasoning, sub-agents, compaction) makes none. Node 0 is the
root, above all rows: its tokens are those that all leaves share. A step is what one model call generated.
Legend: N unique tokens, F flat tokens, B rows, P leaves, V nodes, T steps.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from tree_rl.credit.reductions import normalise
from tree_rl.tree.forest import Forest

CONTEXT = -1
"""Step of a token that no call generated."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CreditRow:
    """One branch of a session."""

    tokens: np.ndarray
    """int [L], token ids, prompt and response."""
    leaf: int
    """Number of its leaf, from 0."""
    steps: np.ndarray
    """int [L], number of the leaf's call that generated each token, in the order of time; `CONTEXT` elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One session."""

    reward: float
    """Outcome."""
    step_rewards: Sequence[float] | None = None
    """Reward of each call, by its number in `CreditRow.steps`; one without a step leaves its to the last before it.
    None: the last step earns the outcome."""
    states: Sequence[Hashable] | None = None
    """Key of the state before each call, equal where sessions were in the same state; lists become tuples. None: not
    reported. Empty: the agent failed before it could; each of its steps has a state of its own."""
    actions: Sequence[Hashable] | None = None
    """Key of the action of each call; None: its token ids."""
    tree: Hashable | None = None
    """Key of the tree that it was branched in; None: leaves that share a generated token are one tree."""
    multiplicity: int = 1
    """Number of equal sessions that it stands for."""
    weight: float = 1.0
    """Weight of the leaf in means; 0 keeps it out of all baselines."""

    def __post_init__(self) -> None:
        for name in ("reward", "weight", "multiplicity"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"{name} {value!r}: expected a finite number")
        if self.multiplicity < 1 or self.multiplicity != int(self.multiplicity):
            raise ValueError(f"multiplicity {self.multiplicity}: expected a whole number of at least 1")
        if self.weight < 0:
            raise ValueError(f"weight {self.weight}: expected at least 0")
        for name in ("step_rewards", "states", "actions"):
            given = getattr(self, name)
            if given is None:
                continue
            if isinstance(given, str | bytes) or not isinstance(given, Sequence | np.ndarray):
                raise ValueError(f"{name} {given!r}: expected a list with an entry for each call")
            if name == "step_rewards":
                wrong = [one for one in given if not isinstance(one, Real) or not math.isfinite(one)]
                if wrong:
                    raise ValueError(f"{name}: {wrong[0]!r}: expected finite numbers")
            else:
                object.__setattr__(self, name, tuple(_key(name, one) for one in given))
        object.__setattr__(self, "tree", _key("tree", self.tree))


def _key(name: str, value: Any) -> Hashable:
    """The value, with tuples for its lists. Raises a ValueError if it still cannot be a key."""
    if isinstance(value, list | tuple | np.ndarray):
        return tuple(_key(name, one) for one in value)
    if not isinstance(value, Hashable):
        raise ValueError(f"{name}: {value!r} cannot be a key; report text, numbers, or lists of them")
    return value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Steps:
    """The steps of all leaves, leaf after leaf, each in the order of time."""

    leaf_T: np.ndarray
    """int64 [T]."""
    number_T: np.ndarray
    """int64 [T], number of its call in the leaf."""
    reward_T: np.ndarray
    """float64 [T]."""
    first_T: np.ndarray
    """int64 [T], flat index of the first token that its call generated, in the first row with its last token. Where
    equal calls fork later, the shared tokens before the fork are steps of the last of them."""
    last_T: np.ndarray
    """int64 [T], flat index of its last token, in the same row."""
    step_F: np.ndarray
    """int64 [F], step of each token; `CONTEXT` if no call generated it."""

    def __len__(self) -> int:
        return len(self.leaf_T)

    def returns(self, gamma: float) -> np.ndarray:
        """Discounted sum of rewards from each step to the end of its leaf, float64 [T]."""
        returned_T, after = np.zeros(len(self)), 0.0
        for step in reversed(range(len(self))):
            is_last = step + 1 == len(self) or self.leaf_T[step + 1] != self.leaf_T[step]
            after = self.reward_T[step] + (0.0 if is_last else gamma * after)
            returned_T[step] = after
        return returned_T


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CreditTree:
    """All rows of a prompt; an estimator turns it into an advantage for each flat token, float64 [F]."""

    rows: tuple[CreditRow, ...]
    """B rows."""
    leaves: tuple[Leaf, ...]
    """P leaves."""
    forest: Forest
    """Forest of the rows."""
    parent_V: np.ndarray
    """int64 [V], parent of each node, which comes before it; -1 at the root."""
    cut_V: np.ndarray
    """int64 [V], unique token after which the node branches off; -1 if it has no token before it."""
    passes_VP: np.ndarray
    """bool [V, P], leaves below each node."""
    node_F: np.ndarray
    """int64 [F], node of each token."""
    steps: Steps
    """Steps of all leaves."""
    tree_P: np.ndarray
    """int64 [P], number of each leaf's tree."""
    name: str = "prompt"
    """Name in messages."""
    reward_P: np.ndarray = field(init=False)
    """float64 [P], outcomes."""
    multiplicity_P: np.ndarray = field(init=False)
    """float64 [P], number of sessions that each leaf stands for."""
    share_P: np.ndarray = field(init=False)
    """float64 [P], weight of each leaf in means: multiplicity times weight."""
    number_P: np.ndarray = field(init=False)
    """float64 [P], the same in baselines: 0 for leaves of weight 0."""

    def __post_init__(self) -> None:
        multiplicity = np.array([leaf.multiplicity for leaf in self.leaves], dtype=np.float64)
        weight = np.array([leaf.weight for leaf in self.leaves], dtype=np.float64)
        derived = {
            "reward_P": np.array([leaf.reward for leaf in self.leaves], dtype=np.float64),
            "multiplicity_P": multiplicity,
            "share_P": multiplicity * weight,
            "number_P": multiplicity * (weight > 0),
        }
        for key, value in derived.items():
            object.__setattr__(self, key, value)

    @classmethod
    def of(cls, rows: Sequence[CreditRow], leaves: Sequence[Leaf], *, name: str = "prompt") -> "CreditTree":
        """Build the tree of a prompt's rows; each leaf has at least one row.

        Raises:
            ValueError: a leaf without rows, or steps that do not fit their row.
        """
        if {row.leaf for row in rows} != set(range(len(leaves))):
            raise ValueError(f"{name}: expected rows of leaves 0 to {len(leaves) - 1}, and of no other")
        if any(len(row.steps) != len(row.tokens) for row in rows):
            raise ValueError(f"{name}: expected a step for each token of a row")
        forest = Forest.from_rows([row.tokens for row in rows])
        steps = _steps(rows, leaves, name)
        parent_V, cut_V, passes_VP, node_S = _nodes(forest, np.array([row.leaf for row in rows]), len(leaves))
        node_F = node_S[forest.segment_of_token[forest.row_index.values]]
        return cls(
            rows=tuple(rows),
            leaves=tuple(leaves),
            forest=forest,
            parent_V=parent_V,
            cut_V=cut_V,
            passes_VP=passes_VP,
            node_F=node_F,
            steps=steps,
            tree_P=_trees(leaves, passes_VP, np.unique(node_F[steps.step_F != CONTEXT])),
            name=name,
        )

    def path(self, row: int) -> list[tuple[int, int, int]]:
        """The nodes of a row: (node, start, end) in tokens of the row."""
        node_L = self.forest.row_index.with_values(self.node_F)[row]
        starts = np.flatnonzero(np.diff(node_L, prepend=-1))
        ends = [*starts[1:].tolist(), len(node_L)]
        return [(int(node_L[start]), int(start), int(end)) for start, end in zip(starts, ends, strict=True)]

    def below(self, values_P: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation (over n) of the leaves below each node, float64 [V]; None takes the rewards.

        Leaves of weight 0 count only where there are no others.
        """
        values_P = self.reward_P if values_P is None else values_P
        share_VP = self.passes_VP * self.share_P
        share_VP = np.where(share_VP.any(axis=1, keepdims=True), share_VP, self.passes_VP * self.multiplicity_P)
        share_VP = share_VP / share_VP.sum(axis=1, keepdims=True)
        mean_V = share_VP @ values_P
        return mean_V, np.sqrt((share_VP * (values_P - mean_V[:, None]) ** 2).sum(axis=1))

    def number_below(self) -> np.ndarray:
        """Number of sessions below each node, float64 [V]."""
        return self.passes_VP @ self.number_P

    def minus_parent(self, values_V: np.ndarray) -> np.ndarray:
        """Difference to the parent's value, float64 [V]; 0 at the root."""
        return values_V - values_V[np.maximum(self.parent_V, 0)]

    def normalise_leaves(
        self, values_P: np.ndarray, group_P: np.ndarray | None = None, *, by_std: bool = True
    ) -> np.ndarray:
        """`normalise` with the leaves' weights, float64 [P]; without groups within the prompt."""
        group_P = np.zeros(len(self.leaves), dtype=np.int64) if group_P is None else group_P
        return normalise(values_P, group_P, share_X=self.share_P, number_X=self.number_P, by_std=by_std)

    def normalise_steps(self, values_T: np.ndarray, group_T: np.ndarray, *, by_std: bool = True) -> np.ndarray:
        """`normalise` of steps with their leaves' weights, float64 [T]."""
        leaf_T = self.steps.leaf_T
        share_T, number_T = self.share_P[leaf_T], self.number_P[leaf_T]
        return normalise(values_T, group_T, share_X=share_T, number_X=number_T, by_std=by_std)

    def states(self, source: str = "reported") -> np.ndarray:
        """Number of the state before each step, int64 [T], equal for equal keys.

        Args:
            source: `reported`: `Leaf.states`. `observation`: the tokens between the generated token before the step and
                the step; the whole prompt for the first.

        Raises:
            ValueError: a leaf reports no states, or too few.
        """
        if source == "observation":
            return _numbered([self._observation(first) for first in self.steps.first_T.tolist()])
        if source != "reported":
            raise ValueError(f"states={source!r}: expected reported or observation")
        pairs = zip(self.steps.leaf_T.tolist(), self.steps.number_T.tolist(), strict=True)
        keys = [
            object() if self.leaves[leaf].states == () else self._reported("states", leaf, number)
            for leaf, number in pairs
        ]
        missing = next((step for step, key in enumerate(keys) if key is None), None)
        if missing is not None:
            raise ValueError(
                f"{self.name}: session {self.steps.leaf_T[missing]} reports no state before call "
                f"{self.steps.number_T[missing]}; let the agent report states, or set "
                "+algorithm.credit.states=observation"
            )
        return _numbered(keys)

    def actions(self) -> np.ndarray:
        """Number of the action of each step, int64 [T], equal for equal keys; without keys for equal tokens."""
        tokens_F, steps = self.forest.input_ids[self.forest.row_index.values], self.steps
        keys = []
        for step, (leaf, number) in enumerate(zip(steps.leaf_T, steps.number_T, strict=True)):
            span = slice(steps.first_T[step], steps.last_T[step] + 1)
            key = self._reported("actions", int(leaf), int(number))
            keys.append(tokens_F[span][steps.step_F[span] >= step].tobytes() if key is None else key)
        return _numbered(keys)

    def _reported(self, name: str, leaf: int, number: int) -> Hashable | None:
        entries = getattr(self.leaves[leaf], name)
        return entries[number] if entries is not None and number < len(entries) else None

    def _observation(self, first: int) -> bytes:
        row = int(np.searchsorted(self.forest.row_index.offsets, first, side="right")) - 1
        start = int(self.forest.row_index.offsets[row])
        generated = np.flatnonzero(self.steps.step_F[start:first] != CONTEXT)
        begin = start + int(generated[-1]) + 1 if len(generated) else start
        return self.forest.input_ids[self.forest.row_index.values[begin:first]].tobytes()

    def on_nodes(self, values_V: np.ndarray) -> np.ndarray:
        """A value per node to every token, float64 [F]."""
        return values_V[self.node_F]

    def on_leaves(self, values_P: np.ndarray) -> np.ndarray:
        """A value per leaf to every token of its rows, float64 [F]."""
        leaf_B = np.array([row.leaf for row in self.rows])
        return np.repeat(values_P[leaf_B], self.forest.row_index.lengths)

    def on_steps(self, values_T: np.ndarray) -> np.ndarray:
        """A value per step to its tokens, float64 [F]; 0 elsewhere."""
        return np.where(self.steps.step_F == CONTEXT, 0.0, np.append(values_T, 0.0)[self.steps.step_F])


def _nodes(
    forest: Forest, leaf_of_row: np.ndarray, num_leaves: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Parent, cut and leaves of each node, and the node of each segment; one with its parent's leaves joins it."""
    passes_SP = np.zeros((forest.num_segments, num_leaves), dtype=bool)
    for row, leaf in enumerate(leaf_of_row):
        passes_SP[forest.segment_of_token[forest.row_index[row]], leaf] = True
    node_S = np.zeros(forest.num_segments, dtype=np.int64)
    parents, cuts, passes = [-1], [-1], [np.ones(num_leaves, dtype=bool)]
    for segment in range(forest.num_segments):
        above = int(forest.segments.parent[segment])
        node = int(node_S[above]) if above >= 0 else 0
        if not np.array_equal(passes_SP[segment], passes[node]):
            parents.append(node)
            cuts.append(int(forest.parent[forest.segments.start[segment]]))
            passes.append(passes_SP[segment])
            node = len(parents) - 1
        node_S[segment] = node
    return np.array(parents), np.array(cuts), np.array(passes), node_S


def _steps(rows: Sequence[CreditRow], leaves: Sequence[Leaf], name: str) -> Steps:
    """Number the steps that rows contain, by leaf and time."""
    number_F = np.concatenate([row.steps for row in rows])
    leaf_F = np.repeat([row.leaf for row in rows], [len(row.tokens) for row in rows])
    generated = np.flatnonzero(number_F != CONTEXT)
    pairs = np.stack([leaf_F[generated], number_F[generated]], axis=1)
    found, inverse = np.unique(pairs, axis=0, return_inverse=True)
    step_F = np.full(len(number_F), CONTEXT, dtype=np.int64)
    step_F[generated] = inverse.ravel()
    leaf_T, number_T = found[:, 0], found[:, 1]
    first_T, last_T = _spans(rows, step_F, len(found))
    reward_T = np.zeros(len(found))
    for leaf, one in enumerate(leaves):
        mine = np.flatnonzero(leaf_T == leaf)
        if one.step_rewards is None:
            reward_T[mine[-1:]] = one.reward
        elif len(mine) and number_T[mine[-1]] >= len(one.step_rewards):
            raise ValueError(
                f"{name}: session {leaf} reports {len(one.step_rewards)} step_rewards, but made at least "
                f"{number_T[mine[-1]] + 1} calls"
            )
        else:
            # A call without trained tokens leaves its reward to the last step before it.
            earner = np.searchsorted(number_T[mine], np.arange(len(one.step_rewards)), side="right") - 1
            reward_C = np.asarray(one.step_rewards, dtype=np.float64)
            np.add.at(reward_T, mine[earner[earner >= 0]], reward_C[earner >= 0])
    return Steps(leaf_T=leaf_T, number_T=number_T, reward_T=reward_T, first_T=first_T, last_T=last_T, step_F=step_F)


def _spans(rows: Sequence[CreditRow], step_F: np.ndarray, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last token of each step, in the first row with its last token; other rows may leave it at a fork."""
    lengths = [len(row.tokens) for row in rows]
    row_F = np.repeat(np.arange(len(rows)), lengths)
    place_F = np.arange(len(step_F)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    generated = np.flatnonzero(step_F != CONTEXT)
    deepest = generated[np.lexsort((generated, -place_F[generated], step_F[generated]))]
    last_T = deepest[np.searchsorted(step_F[deepest], np.arange(num_steps))]
    whole = generated[row_F[generated] == row_F[last_T][step_F[generated]]]
    first_T = whole[np.unique(step_F[whole], return_index=True)[1]]
    for step, first in enumerate(first_T.tolist()):
        # Tokens of a later call directly before it: both generated them.
        while place_F[first] and step_F[first - 1] > step:
            first -= 1
        first_T[step] = first
    return first_T, last_T


def _trees(leaves: Sequence[Leaf], passes_VP: np.ndarray, generated_V: np.ndarray) -> np.ndarray:
    """int64 [P]: by key, else leaves that share a node with generated tokens, directly or through others."""
    tree = list(range(len(leaves)))
    for node in generated_V.tolist():
        members = np.flatnonzero(passes_VP[node]).tolist()
        merged = {tree[member] for member in members}
        tree = [min(merged) if one in merged else one for one in tree]
    return _numbered(
        [("tree", one) if leaf.tree is None else leaf.tree for one, leaf in zip(tree, leaves, strict=True)]
    )


def _numbered(keys: Sequence[Hashable]) -> np.ndarray:
    """int64, equal for equal keys, from 0 in the order of appearance."""
    number: dict[Hashable, int] = {}
    return np.array([number.setdefault(key, len(number)) for key in keys], dtype=np.int64)
