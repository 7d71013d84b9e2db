"""A forest cut into partitions, each run in one forward, and the order that keeps one path of them alive.

Paper, section Redundancy-Free Tree Partitioning.
Legend: N unique tokens, n tokens of a partition, P tokens of its past, e edges that start in it.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

Op = tuple[Literal["forward", "backward"], int]
"""One step of the runner and the partition that it runs."""

SolverName = Literal["heuristic", "dynamic_programming", "cp_sat"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cut:
    """A token of a partition below which children hang: one gateway, however many children read it."""

    token: int
    """The unique token."""
    local_token: int
    """Its index in the partition."""
    path: np.ndarray
    """int32, indices in the partition of the token and its ancestors there, ascending. The past of a child is the past
    of this partition followed by these."""
    past_length: int
    """Tokens of the root-to-cut path, the cut token included: P of every child."""
    children: tuple[int, ...]
    """Partitions that hang here, in order of execution."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Partition:
    """Subtrees (with what was cut off below them) that hang from one token, or that are roots."""

    tokens: np.ndarray
    """int32 [n], unique tokens, ascending: the order of the forward."""
    parent: int
    """Partition that holds the cut token, -1 where there is no past."""
    cut_token: int
    """Unique token whose root-to-cut path is the past, -1 where there is none."""
    past_length: int
    """P, tokens of the past; 0 for roots."""
    position: np.ndarray
    """int32 [n], depth on the whole path: the RoPE position, past included."""
    local_parent: np.ndarray
    """int32 [n], index in the partition of the preceding token; -1 after the cut token and at a root."""
    local_subtree_end: np.ndarray
    """int32 [n], first index in the partition past the tokens that continue this one."""
    edge_token: np.ndarray
    """int32 [e], unique tokens that follow a token of this partition, here or in a child partition, ascending: their
    log-probs belong here."""
    edge_start: np.ndarray
    """int32 [e], index in the partition of the token before each."""
    cuts: tuple[Cut, ...]
    """Tokens with children, ascending."""
    children: tuple[int, ...]
    """Child partitions, in order of execution."""

    @property
    def num_tokens(self) -> int:
        """n."""
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartitionPlan:
    """Partitions in order of their forwards: a parent comes before its children."""

    capacity_tokens: int
    """C, most unique tokens of a partition."""
    partitions: tuple[Partition, ...]
    """All partitions; every unique token is in exactly one."""
    partition_of_token: np.ndarray
    """int32 [N], partition of each unique token."""
    local_index: np.ndarray
    """int32 [N], index of each unique token in its partition."""
    ops: tuple[Op, ...]
    """Depth first: forward of a partition, all of each child in turn, then its backward."""
    relayed_tokens: int
    """Sum of the past lengths."""
    depth: int
    """Partitions on the longest path: most graphs alive at a time."""
    peak_live_tokens: int
    """Most unique tokens whose graphs are alive at a time."""
    lower_bound: int
    """No plan has fewer partitions."""
    solver: SolverName
    """Who found this plan."""
    is_optimal: bool
    """Whether partitions, then relayed tokens, then depth are proven minimal."""

    @property
    def num_partitions(self) -> int:
        """Forwards, and backwards, of a step."""
        return len(self.partitions)

    @property
    def utilisation(self) -> float:
        """N / (partitions * C), 1 where every partition is full; 1 for an empty forest."""
        room = self.num_partitions * self.capacity_tokens
        return len(self.partition_of_token) / room if room else 1.0
