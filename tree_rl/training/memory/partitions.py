"""Predicted peak of a forest in partitions: what is alive at each op of its plan.

A partition that waits for its children keeps its graph, its past and what children read; once one of them has reported
also the gradients that they sent. Legend: n tokens of a partition, P tokens of its past, r relayed tokens.
"""

from dataclasses import dataclass

import numpy as np

from tree_rl.training.memory.measures import MemoryMeasures
from tree_rl.training.memory.model import FLOAT32, MemoryModel, Peak
from tree_rl.tree.partition import Partition, PartitionPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionSize:
    """What of a partition decides its memory."""

    tokens: int
    """n."""
    past: int
    """P."""
    relayed: int
    """r, tokens on any path to a cut."""
    longest_path: int
    """Tokens on the longest of these paths."""
    head_tokens: int
    """Tokens that the head reads."""

    @classmethod
    def of(cls, partition: Partition, head_share: float) -> "PartitionSize":
        """Measure a partition of which the head reads such a share."""
        paths = [cut.path for cut in partition.cuts]
        return cls(
            tokens=partition.num_tokens,
            past=partition.past_length,
            relayed=len(np.unique(np.concatenate(paths))) if paths else 0,
            longest_path=max(map(len, paths), default=0),
            head_tokens=round(head_share * partition.num_tokens),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Alive:
    """Bytes of one partition between its forward and its backward."""

    graph: Peak
    """Inputs of its layers, or all that they save."""
    more: Peak
    """What the head's backward reads, its past, and what children read."""
    reported: float
    """Gradients from children, from the first report on."""


class PartitionedPeak:
    """Peaks of one plan under any measures."""

    def __init__(self, model: MemoryModel, plan: PartitionPlan, *, head_share: float = 1.0) -> None:
        """Measure the partitions.

        Args:
            model: what a token keeps alive.
            plan: the partitions.
            head_share: share of their tokens that the head reads.
        """
        self._model, self._plan = model, plan
        self._sizes = [PartitionSize.of(partition, head_share) for partition in plan.partitions]

    def under(self, measures: MemoryMeasures) -> Peak:
        """Walk the ops."""
        parents = [partition.parent for partition in self._plan.partitions]
        alive = [self._alive(size, measures) for size in self._sizes]
        device = host = most_device = most_host = 0.0
        reported: set[int] = set()
        for kind, number in self._plan.ops:
            own, size, parent = alive[number], self._sizes[number], parents[number]
            if kind == "forward":
                most_device = max(most_device, device + self._forward(size, own))
                device += own.graph.device + own.more.device
                host += own.graph.host + own.more.host
                most_host = max(most_host, host)
                continue
            device -= own.graph.device + own.more.device + (own.reported if number in reported else 0.0)
            host -= own.graph.host + own.more.host
            most_device = max(most_device, device + self._backward(size, own, measures))
            if parent >= 0 and parent not in reported:
                reported.add(parent)
                device += alive[parent].reported
        return Peak(device=most_device, host=most_host)

    def _alive(self, size: PartitionSize, measures: MemoryMeasures) -> _Alive:
        model = self._model
        relays = model.relayed * (size.relayed + size.past)
        on_host = relays if measures.relays_on_host and size.relayed else 0.0
        head = model.head_waits(size.tokens, size.head_tokens) + model.inputs * size.tokens
        return _Alive(
            graph=model.waiting(size.tokens, measures),
            more=Peak(device=head + relays - on_host, host=on_host),
            reported=self._passed(size) + model.relayed_gradients * size.relayed,
        )

    def _forward(self, size: PartitionSize, own: _Alive) -> float:
        """Layers keep keys and values of all tokens until the forward's end, when those of relayed ones are copied."""
        model = self._model
        kept = own.graph.device + model.inputs * size.tokens + model.relayed * (size.past + size.tokens)
        return kept + max(model.layer_forward(size.tokens), model.relayed * size.relayed)

    def _backward(self, size: PartitionSize, own: _Alive, measures: MemoryMeasures) -> float:
        """At its start, in its last layer, in its first one, and when the gradients of its past go up."""
        model = self._model
        entering = (model.relayed if model.value_bytes < FLOAT32 else model.relayed_gradients) * size.relayed
        kept = model.relayed * size.past + entering + self._passed(size) + model.inputs * size.tokens
        layer = model.layer_backward(size.tokens, size.past, tile_tokens=measures.tile_tokens)
        in_last = own.graph.device + max(layer, model.head(size.tokens, size.head_tokens))
        in_first = model.relayed * size.past + layer + model.boundary * size.tokens
        upward = (model.relayed_gradients + model.keys_and_values) * size.past
        return kept + max(in_last, in_first, upward)

    def _passed(self, size: PartitionSize) -> float:
        """Gradients of the past of children, which go on to the parent."""
        return self._model.relayed_gradients * (size.past + size.longest_path) if size.relayed else 0.0
