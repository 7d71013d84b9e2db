"""Partition plans of late groups: old log-probs, references and every epoch of an update run the same forests.

A training step then plans each group once; how long that took is the metric `tree/plan_seconds`.
"""

from collections import OrderedDict
from hashlib import blake2b

from tree_rl.tree.forest import Forest
from tree_rl.tree.partition import PartitionPlan, plan_partitions

MOST_TOKENS = 8_000_000
"""Unique tokens of all plans that are kept: about 300 MB of host memory."""


class PlanMemory:
    """Plans by the shape of their forest and the budget; the least recently used go first."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        """Remember nothing yet."""
        self._most_tokens = most_tokens
        self._plans: OrderedDict[tuple[bytes, int], tuple[PartitionPlan, int]] = OrderedDict()

    def plan(self, forest: Forest, max_tokens: int) -> PartitionPlan:
        """The plan of a forest, made now unless one of the same shape is known.

        Args:
            forest: N unique tokens; which tokens they are does not matter.
            max_tokens: C, most unique tokens of a partition.
        """
        shape = blake2b(forest.subtree_end.tobytes(), digest_size=16)
        shape.update(forest.segments.start.tobytes())
        key = (shape.digest(), max_tokens)
        known = self._plans.pop(key, None)
        plan = plan_partitions(forest, max_tokens) if known is None else known[0]
        self._plans[key] = (plan, forest.num_unique)
        while sum(tokens for _, tokens in self._plans.values()) > self._most_tokens and len(self._plans) > 1:
            self._plans.popitem(last=False)
        return plan
