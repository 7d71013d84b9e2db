"""Predicts the peak memory of a partitioned forest from the tensors that are alive at each op of its plan.

One stack holds the keys and values of the path, another their accumulated gradients. A partition keeps its graph while
its children run. If it has several cuts, it also keeps its keys and values and their gradients outside the stacks.
Legend: n tokens of a partition, P tokens of its past, r relayed tokens.
"""

from dataclasses import dataclass

import numpy as np

from tree_rl.cost.memory.model import MemoryModel, Peak
from tree_rl.cost.memory.saving import MemorySaving
from tree_rl.tree.partition import Partition, PartitionPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionSize:
    """Sizes of a partition that decide its memory."""

    tokens: int
    """n, tokens of the partition."""
    past: int
    """P, tokens of the past."""
    relayed: int
    """r, tokens on any path to a cut."""
    cuts: int
    """Number of tokens below which child partitions start."""
    head_tokens: int
    """Tokens that the head reads."""

    @classmethod
    def of(cls, partition: Partition, head_share: float) -> "PartitionSize":
        """Sizes of a partition; the head reads `head_share` of its tokens."""
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
    """Bytes that one partition keeps between its forward and its backward."""

    waiting: Peak
    """Graph, tensors for the head's backward, and keys and values outside the stack."""
    reported: float
    """Gradients from children outside the stack, which exist once the first child has run backward."""


class PartitionedPeak:
    """Predicts the peak of one plan under any `MemorySaving`."""

    def __init__(self, model: MemoryModel, plan: PartitionPlan, *, head_share: float = 1.0) -> None:
        """Precompute sizes; `head_share` is the share of tokens that the head reads."""
        self._model, self._plan = model, plan
        self._sizes = [PartitionSize.of(partition, head_share) for partition in plan.partitions]
        self._longest_past = max((size.past for size in self._sizes), default=0)

    def under(self, saving: MemorySaving) -> Peak:
        """Simulate the plan's ops; the peak on device and host."""
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
                # The first backward with a past allocates the gradient stack layer by layer while it frees inputs.
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
        # Without checkpointing, attention saves the past concatenated with the partition's own keys and values.
        saved_past = 0.0 if model.checkpointing else model.relayed * size.past
        return _Alive(
            waiting=Peak(device=graph.device + head + own - on_host + saved_past, host=graph.host + on_host),
            reported=model.relayed_gradients * size.relayed if size.cuts > 1 else 0.0,
        )

    def _forward(self, size: PartitionSize, saving: MemorySaving) -> float:
        """Bytes of a forward. If there are children, layers keep all tokens' keys and values until its end."""
        model = self._model
        captured = model.relayed if size.cuts else 0.0
        kept = model.waiting(size.tokens, saving).device + (model.inputs + captured) * size.tokens
        past = model.keys_and_values * size.past * (2 if saving.relays_on_host else 1)
        return kept + model.layer_forward(size.tokens, tile_tokens=saving.tile_tokens) + past

    def _backward(self, size: PartitionSize, saving: MemorySaving, *, has_graph: bool = True) -> float:
        """Bytes at the start of a backward, in the head or the last layer; without a graph: at its end."""
        model = self._model
        graph = model.waiting(size.tokens, saving).device if has_graph else model.layer_input(size.tokens)
        # For all layers at once: gradients of relayed keys and values, and their scatter over all tokens.
        entering = model.relayed * (size.relayed + size.tokens) if size.cuts else 0.0
        layer = model.layer_backward(size.tokens, size.past, tile_tokens=saving.tile_tokens)
        if saving.relays_on_host:
            layer += model.keys_and_values * size.past
        head = model.head(size.tokens, size.head_tokens)
        return graph + model.inputs * size.tokens + entering + max(layer, head)
