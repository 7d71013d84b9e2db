"""What the rows' loss reads from a partitioned forest: log-probs and entropies of edges, or values of tokens.

A slot is one number of that kind, computed in exactly one partition: an edge belongs to its parent token's partition
(DESIGN invariant 3). Legend: E slots, e slots of a partition, F flat tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from tree_rl.models.edge_head import EdgeRequest, edge_values
from tree_rl.training.edges import EdgePlan, request_edges, scatter
from tree_rl.tree.forest import Forest
from tree_rl.tree.partition import PartitionPlan

LOG_PROBS, ENTROPY, SUM_PI_SQUARED = "log_probs", "entropy", "sum_pi_squared"

SlotValues = dict[str, torch.Tensor]
"""Name -> [E] or [e]."""


class Readout(Protocol):
    """Reads slots from a partition's forward and turns slots into what rows see."""

    device: torch.device
    """Where everything runs."""
    values: SlotValues
    """Name -> [E], values known so far, without graph."""

    def read(self, model: Callable[..., Any], model_kwargs: dict[str, object], partition: int) -> SlotValues:
        """Forward of one partition: name -> [e], with graph."""

    def store(self, partition: int, values: SlotValues) -> None:
        """Keep the values of a partition, without graph."""

    def surrogate(self, partition: int, values: SlotValues, gradients: SlotValues) -> torch.Tensor:
        """Scalar whose gradient is sum of dL/dvalue * dvalue over the partition's slots."""

    def preset(self, name: str, values_F: torch.Tensor) -> None:
        """Take values that the rows know already, [F]."""

    def flat(self, values: SlotValues) -> SlotValues:
        """Slots as the rows see them: name -> [F], differentiable."""


class _Slots:
    """Slots of each partition, and the bookkeeping that both readouts share."""

    def __init__(
        self, slots_of: list[np.ndarray], num_slots: int, names: tuple[str, ...], device: torch.device
    ) -> None:
        self.device = device
        self.names = names
        self._slots_of = [torch.from_numpy(slots.astype(np.int64)).to(device) for slots in slots_of]
        self.values: SlotValues = {name: torch.zeros(num_slots, device=device) for name in names}

    def store(self, partition: int, values: SlotValues) -> None:
        """Keep the values of a partition, without graph."""
        for name, known in self.values.items():
            got = values[name].detach()
            if known.dtype != got.dtype:
                self.values[name] = known = known.to(got.dtype)
            known[self._slots_of[partition]] = got

    def surrogate(self, partition: int, values: SlotValues, gradients: SlotValues) -> torch.Tensor:
        """See `Readout.surrogate`."""
        slots = self._slots_of[partition]
        terms = [(values[name] * gradients[name][slots]).sum() for name in self.names if name in gradients]
        return torch.stack(terms).sum() + values["anchor"]


class EdgeReadout(_Slots):
    """Log-probs (and entropies) of wanted edges."""

    def __init__(
        self, plan: PartitionPlan, edges: EdgePlan, *, names: tuple[str, ...] = (LOG_PROBS,), device: torch.device
    ) -> None:
        """Give each edge to the partition of its source token.

        Args:
            plan: the partitions.
            edges: wanted edges of the forest.
            names: log_probs, and optionally entropy and sum_pi_squared.
            device: where everything runs.
        """
        source_E = edges.source_R[edges.row_of_edge_E]
        owner_E = plan.partition_of_token[source_E]
        slots_of = [np.flatnonzero(owner_E == number) for number in range(plan.num_partitions)]
        super().__init__(slots_of, len(source_E), names, device)
        self._edges = edges
        self._requests: list[EdgeRequest] = []
        for slots in slots_of:
            sources, row_of_edge = np.unique(plan.local_index[source_E[slots]], return_inverse=True)
            request = request_edges(
                sources,
                row_of_edge,
                edges.target_E[slots],
                edges.temperature_E[slots],
                device=device,
                entropy=ENTROPY in names,
                sum_pi_squared=SUM_PI_SQUARED in names,
            )
            self._requests.append(request)

    def read(self, model: Callable[..., Any], model_kwargs: dict[str, object], partition: int) -> SlotValues:
        """Only the tokens of the partition that wanted edges start from meet the head."""
        per_edge = edge_values(model, model_kwargs, self._requests[partition])
        named = zip((LOG_PROBS, ENTROPY, SUM_PI_SQUARED), per_edge, strict=True)
        values = {name: value for name, value in named if value is not None}
        # The sum of nothing is zero and still carries the graph of relayed keys, also where no edge is wanted.
        return {**values, "anchor": per_edge.log_prob[:0].sum()}

    def preset(self, name: str, values_F: torch.Tensor) -> None:
        """See `Readout.preset`."""
        reads = self._edges.reads
        known = self.values[name].to(torch.promote_types(values_F.dtype, torch.float32))
        known[reads.edge_W] = values_F.to(known)[reads.flat_W]
        self.values[name] = known

    def flat(self, values: SlotValues) -> SlotValues:
        """See `Readout.flat`; 0 where no edge was wanted."""
        return {name: scatter(values[name], self._edges.reads) for name in self.names}


class ValueReadout(_Slots):
    """Values of all tokens, from a token classifier with one label."""

    def __init__(self, forest: Forest, plan: PartitionPlan, *, device: torch.device) -> None:
        """Give each token its partition."""
        slots_of = [partition.tokens for partition in plan.partitions]
        super().__init__(slots_of, forest.num_unique, ("values",), device)
        self._row_index_F = torch.from_numpy(forest.row_index.values.astype(np.int64)).to(device)

    def read(self, model: Callable[..., Any], model_kwargs: dict[str, object], partition: int) -> SlotValues:
        """Values of the partition's tokens."""
        values_n = model(**model_kwargs).logits[0, :, 0]
        return {"values": values_n, "anchor": (values_n[:1] * 0).sum()}

    def preset(self, name: str, values_F: torch.Tensor) -> None:
        """See `Readout.preset`."""
        self.values[name] = self.values[name].to(values_F.dtype)
        self.values[name][self._row_index_F] = values_F.to(self.device)

    def flat(self, values: SlotValues) -> SlotValues:
        """See `Readout.flat`."""
        return {"values": values["values"][self._row_index_F]}
