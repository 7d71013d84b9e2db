"""Predicts the peak memory of a partitioned forest from the tensors that are alive at each op of its plan.

One stack holds the keys and values of the path, another their accumulated gradients. A partition keeps its graph while
its children run. If it has several cuts, it also keeps its keys and values and their gradients outside the stacks.
Legend: n tokens of a partition, P tokens of its past, r relayed tokens.
"""

from dataclasses import dataclass

from tree_rl.cost.memory.model import MemoryModel, MemorySaving, Peak
from tree_rl.tree.partition import Partition, PartitionPlan


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
        self._model, self._plan, self._head_share = model, plan, head_share
        self._relayed = [len(partition.relayed_tokens) for partition in plan.partitions]
        self._longest_past = max((partition.past_length for partition in plan.partitions), default=0)

    def under(self, saving: MemorySaving) -> Peak:
        """Simulate the plan's ops; the peak on device and host."""
        stack, sums = self._model.relayed * self._longest_past, self._model.relayed_gradients * self._longest_past
        sums_on_device = 0.0 if saving.relays_on_host else sums
        alive = [self._alive(number, saving) for number in range(self._plan.num_partitions)]
        device = host = most_device = most_host = 0.0
        reported: set[int] = set()
        for kind, number in self._plan.ops:
            own, partition = alive[number], self._plan.partitions[number]
            if kind == "forward":
                most_device = max(most_device, device + self._forward(partition, saving))
                device, host = device + own.waiting.device, host + own.waiting.host
                most_host = max(most_host, host)
                continue
            device -= own.waiting.device + (own.reported if number in reported else 0.0)
            host -= own.waiting.host
            backward = device + self._backward(number, saving)
            if sums_on_device and partition.past_length:
                # The first backward with a past allocates the gradient stack layer by layer while it frees inputs.
                first_layer = device + sums_on_device + self._backward(number, saving, has_graph=False)
                backward, device, sums_on_device = max(backward, first_layer), device + sums_on_device, 0.0
            most_device = max(most_device, backward)
            if partition.parent >= 0 and partition.parent not in reported:
                reported.add(partition.parent)
                device += alive[partition.parent].reported
        if saving.relays_on_host:
            return Peak(device=most_device, host=most_host + stack + sums)
        return Peak(device=most_device + stack, host=most_host)

    def _alive(self, number: int, saving: MemorySaving) -> _Alive:
        model, partition, relayed = self._model, self._plan.partitions[number], self._relayed[number]
        tokens = partition.num_tokens
        graph = model.waiting(tokens, saving, in_flight=0)
        head = model.head_waits(tokens, self._head_tokens(partition)) + model.inputs * tokens
        own = model.relayed * relayed if len(partition.cuts) > 1 else 0.0
        on_host = own if saving.relays_on_host else 0.0
        # Without checkpointing, attention saves the past concatenated with the partition's own keys and values.
        saved_past = 0.0 if model.checkpointing else model.relayed * partition.past_length
        return _Alive(
            waiting=Peak(device=graph.device + head + own - on_host + saved_past, host=graph.host + on_host),
            reported=model.relayed_gradients * relayed if len(partition.cuts) > 1 else 0.0,
        )

    def _forward(self, partition: Partition, saving: MemorySaving) -> float:
        """Bytes of a forward. If there are children, layers keep all tokens' keys and values until its end."""
        model, tokens = self._model, partition.num_tokens
        captured = model.relayed if partition.cuts else 0.0
        kept = model.waiting(tokens, saving).device + (model.inputs + captured) * tokens
        past = model.keys_and_values * partition.past_length * (2 if saving.relays_on_host else 1)
        return kept + model.layer_forward(tokens, tile_tokens=saving.tile_tokens) + past

    def _backward(self, number: int, saving: MemorySaving, *, has_graph: bool = True) -> float:
        """Bytes at the start of a backward, in the head or the last layer; without a graph: at its end."""
        model, partition, relayed = self._model, self._plan.partitions[number], self._relayed[number]
        tokens = partition.num_tokens
        graph = model.waiting(tokens, saving).device if has_graph else model.layer_input(tokens)
        # For all layers at once: gradients of relayed keys and values, and their scatter over all tokens.
        entering = model.relayed * (relayed + tokens) if partition.cuts else 0.0
        layer = model.layer_backward(tokens, partition.past_length, tile_tokens=saving.tile_tokens)
        if saving.relays_on_host:
            layer += model.keys_and_values * partition.past_length
        head = model.head(tokens, self._head_tokens(partition))
        return graph + model.inputs * tokens + entering + max(layer, head)

    def _head_tokens(self, partition: Partition) -> int:
        return round(self._head_share * partition.num_tokens)
