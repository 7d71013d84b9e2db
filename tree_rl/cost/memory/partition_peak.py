"""Predicted peak of a forest in partitions: what is alive at each op of its plan.

One stack holds the keys and values of the path, another the sums of their gradients. A partition that waits for its
children keeps its graph; where children hang from several cuts, also its own keys and values and sums of gradients.
Legend: n tokens of a partition, P tokens of its past, r relayed tokens.
"""

from dataclasses import dataclass

import numpy as np

from tree_rl.cost.memory.model import MemoryModel, Peak
from tree_rl.cost.memory.saving import MemorySaving
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
    cuts: int
    """Tokens that children hang from."""
    head_tokens: int
    """Tokens that the head reads."""

    @classmethod
    def of(cls, partition: Partition, head_share: float) -> "PartitionSize":
        """Measure a partition of which the head reads such a share."""
        paths = [cut.path for cut in partition.cuts]
        return cls(
            tokens=partition.num_tokens,
            past=partition.past_length,
            relayed=len(np.unique(np.concatenate(paths))) if len(paths) > 1 else sum(map(len, paths)),
            cuts=len(paths),
            head_tokens=round(head_share * partition.num_tokens),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Alive:
    """Bytes of one partition between its forward and its backward."""

    waiting: Peak
    """Its graph, what the head's backward reads, and its own keys and values."""
    reported: float
    """Sums of gradients from children, from the first report on."""


class PartitionedPeak:
    """Peaks of one plan however memory is saved."""

    def __init__(self, model: MemoryModel, plan: PartitionPlan, *, head_share: float = 1.0) -> None:
        """Measure the partitions.

        Args:
            model: what a token keeps alive.
            plan: the partitions.
            head_share: share of their tokens that the head reads.
        """
        self._model, self._plan = model, plan
        self._sizes = [PartitionSize.of(partition, head_share) for partition in plan.partitions]
        self._longest_past = max((size.past for size in self._sizes), default=0)

    def under(self, saving: MemorySaving) -> Peak:
        """Walk the ops."""
        stack, sums = self._model.relayed * self._longest_past, self._model.relayed_gradients * self._longest_past
        sums_on_device = 0.0 if saving.relays_on_host else sums
        alive = [self._alive(size, saving) for size in self._sizes]
        device = host = most_device = most_host = 0.0
        reported: set[int] = set()
        for kind, number in self._plan.ops:
            own, size, parent = alive[number], self._sizes[number], self._plan.partitions[number].parent
            if kind == "forward":
                most_device = max(most_device, device + self._forward(size, saving))
                device, host = device + own.waiting.device, host + own.waiting.host
                most_host = max(most_host, host)
                continue
            device -= own.waiting.device + (own.reported if number in reported else 0.0)
            host -= own.waiting.host
            backward = device + self._backward(size, saving)
            if sums_on_device and size.past:
                # Made by the first backward with a past, layer by layer: while inputs of layers are freed.
                first_layer = device + sums_on_device + self._backward(size, saving, has_graph=False)
                backward, device, sums_on_device = max(backward, first_layer), device + sums_on_device, 0.0
            most_device = max(most_device, backward)
            if parent >= 0 and parent not in reported:
                reported.add(parent)
                device += alive[parent].reported
        if saving.relays_on_host:
            return Peak(device=most_device, host=most_host + stack + sums)
        return Peak(device=most_device + stack, host=most_host)

    def _alive(self, size: PartitionSize, saving: MemorySaving) -> _Alive:
        model = self._model
        graph = model.waiting(size.tokens, saving, in_flight=0)
        head = model.head_waits(size.tokens, size.head_tokens) + model.inputs * size.tokens
        own = model.relayed * size.relayed if size.cuts > 1 else 0.0
        on_host = own if saving.relays_on_host else 0.0
        # Without checkpoints attention saves the past side by side with the partition's own keys and values.
        saved_past = 0.0 if model.checkpointing else model.relayed * size.past
        return _Alive(
            waiting=Peak(device=graph.device + head + own - on_host + saved_past, host=graph.host + on_host),
            reported=model.relayed_gradients * size.relayed if size.cuts > 1 else 0.0,
        )

    def _forward(self, size: PartitionSize, saving: MemorySaving) -> float:
        """Layers keep keys and values of all tokens until the forward's end, where children will read some."""
        model = self._model
        captured = model.relayed if size.cuts else 0.0
        kept = model.waiting(size.tokens, saving).device + (model.inputs + captured) * size.tokens
        past = model.keys_and_values * size.past * (2 if saving.relays_on_host else 1)
        return kept + model.layer_forward(size.tokens, tile_tokens=saving.tile_tokens) + past

    def _backward(self, size: PartitionSize, saving: MemorySaving, *, has_graph: bool = True) -> float:
        """At its start: in the head, or in the last layer; at its end without what waited for it."""
        model = self._model
        graph = model.waiting(size.tokens, saving).device if has_graph else model.layer_input(size.tokens)
        # Gradients of relayed keys and values, and where they are spread over all tokens: of all layers at once.
        entering = model.relayed * (size.relayed + size.tokens) if size.cuts else 0.0
        layer = model.layer_backward(size.tokens, size.past, tile_tokens=saving.tile_tokens)
        if saving.relays_on_host:
            layer += model.keys_and_values * size.past
        head = model.head(size.tokens, size.head_tokens)
        return graph + model.inputs * size.tokens + entering + max(layer, head)
