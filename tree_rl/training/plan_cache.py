"""Cache of partition plans: passes for old log-probs, references and every epoch of an update run the same forests.

A training step thus plans each group once; the metric `tree/plan_seconds` is the time it took.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from hashlib import blake2b
from typing import Any, Literal, TypeVar

from tree_rl.tree.forest import Forest
from tree_rl.tree.partition import PartitionPlan, plan_partitions

Made = TypeVar("Made")

MOST_TOKENS = 8_000_000
"""Most unique tokens of all cached plans: about 300 MB of host memory."""


class PlanCache:
    """LRU cache of plans, keyed by the shape of the forest and the budget."""

    def __init__(self, most_tokens: int = MOST_TOKENS, *, is_shared: bool = False) -> None:
        """Start without plans.

        Args:
            most_tokens: most unique tokens of all cached plans.
            is_shared: True if other ranks run the same plans. The solver, whose plan may depend on the clock, then
                does not run.
        """
        self._most_tokens, self._is_shared = most_tokens, is_shared
        self._known: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def plan(self, forest: Forest, max_tokens: int) -> PartitionPlan:
        """The plan of a forest with at most `max_tokens` unique tokens per partition; token ids do not matter."""
        solver: Literal["heuristic", "auto"] = "heuristic" if self._is_shared else "auto"
        return self.recall(forest, max_tokens, lambda: plan_partitions(forest, max_tokens, solver=solver))

    def recall(self, forest: Forest, asked: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returns, how the forest runs; `asked` is the rest of the cache key, all its other inputs."""
        shape = blake2b(forest.subtree_end.tobytes(), digest_size=16)
        shape.update(forest.segments.start.tobytes())
        key = (shape.digest(), asked)
        found, _ = self._known.pop(key, (None, 0))
        made: Made = make() if found is None else found
        self._known[key] = (made, forest.num_unique)
        while sum(tokens for _, tokens in self._known.values()) > self._most_tokens and len(self._known) > 1:
            self._known.popitem(last=False)
        return made
