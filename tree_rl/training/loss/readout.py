"""What the rows' loss reads from a partitioned forest: outputs of edges, or values of tokens.

A slot is the edge (or token) whose outputs are computed, in exactly one partition: an edge belongs to the partition of
its source token (docs/code.md, "What always holds" 2).
Legend: E slots, e slots of a partition, F flat tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tree_rl.models.edge_head import EdgeRequest, edge_values
from tree_rl.models.sequence_parallel import SequenceParallel
from tree_rl.models.tree_inputs import TreeInputs
from tree_rl.training.loss.edge_share import EdgeShare
from tree_rl.training.loss.edges import EdgePlan, FlatReads, outputs_of_rows, request_edges
from tree_rl.training.loss.outputs import LOG_PROBS, VALUES, EdgeOutputs, PartsLoss, Wanted
from tree_rl.tree.forest import Forest
from tree_rl.tree.partition import PartitionPlan

Model = Callable[..., Any]
Read = tuple[EdgeOutputs, torch.Tensor]
"""Outputs [e] of a partition with graph, and the anchor: a scalar 0 computed from the module's output. It keeps the
partition's forward in the graph if no slot is wanted."""


class Readout(ABC):
    """Reads slots from a partition's forward and scatters them to the rows."""

    def __init__(
        self, slots_of: list[np.ndarray], num_slots: int, names: Wanted, reads: FlatReads, device: torch.device
    ) -> None:
        self._reads = reads
        self._slots_of = [torch.from_numpy(slots.astype(np.int64)).to(device) for slots in slots_of]
        self._known = EdgeOutputs.of({name: torch.zeros(num_slots, device=device) for name in names}).present()

    @property
    def values(self) -> EdgeOutputs:
        """Values [E] known so far, without graph."""
        return EdgeOutputs(**self._known)

    def store(self, partition: int, outputs: EdgeOutputs) -> None:
        """Keep the values of a partition, without graph."""
        for name, got in outputs.detach().present().items():
            if self._known[name].dtype != got.dtype:
                self._known[name] = self._known[name].to(got.dtype)
            self._known[name][self._slots_of[partition]] = got

    def surrogate(self, partition: int, outputs: EdgeOutputs, gradients: EdgeOutputs) -> torch.Tensor:
        """Scalar whose gradient with respect to the partition's slots is dL/dvalue."""
        slots = self._slots_of[partition]
        of_slot = gradients.present()
        return torch.stack([(value * of_slot[name][slots]).sum() for name, value in outputs.present().items()]).sum()

    @abstractmethod
    def read(self, model: Model, inputs: TreeInputs, partition: int) -> Read:
        """Run one partition forward."""

    def gradients(self, loss: PartsLoss, slots: EdgeOutputs) -> EdgeOutputs:
        """dL/dvalue of every slot at the values [E] in `slots`; does not run the model.

        A token-separable loss needs only the values of the partition that runs; others need all values.

        Args:
            loss: the trainer's loss with path weights.
            slots: values [E].
        """
        with torch.enable_grad():
            leaves = slots.map(lambda value: value.clone().requires_grad_())
            value, _ = loss(self.flat(leaves))
            named = leaves.present()
            gradients = torch.autograd.grad(value, list(named.values()), allow_unused=True, materialize_grads=True)
        return EdgeOutputs(**dict(zip(named, gradients, strict=True)))

    def preset_log_probs(self, known_F: torch.Tensor) -> None:
        """Set log-probs from known ones of the rows, [F]."""
        known = self._known[LOG_PROBS].to(torch.promote_types(known_F.dtype, torch.float32))
        known[self._reads.edge_W] = known_F.to(known)[self._reads.flat_W]
        self._known[LOG_PROBS] = known

    def flat(self, slots: EdgeOutputs) -> EdgeOutputs:
        """Scatter slots to the rows, [F]; differentiable; 0 where nothing is wanted."""
        return outputs_of_rows(slots, self._reads)


class EdgeReadout(Readout):
    """Log-probs, and other outputs, of wanted edges."""

    def __init__(
        self,
        plan: PartitionPlan,
        edges: EdgePlan,
        *,
        names: Wanted = (LOG_PROBS,),
        device: torch.device,
        ranks: SequenceParallel | None = None,
    ) -> None:
        """Assign each wanted edge to the partition of its source token; `ranks` share the tokens of each partition."""
        source_E = edges.source_E
        owner_E = plan.partition_of_token[source_E]
        slots_of = [np.flatnonzero(owner_E == number) for number in range(plan.num_partitions)]
        extras = tuple(name for name in names if name != LOG_PROBS)
        super().__init__(slots_of, len(source_E), (LOG_PROBS, *extras), edges.reads, device)
        self._requests: list[EdgeRequest] = []
        self._shares: list[EdgeShare | None] = []
        for slots, partition in zip(slots_of, plan.partitions, strict=True):
            source_e = plan.local_index[source_E[slots]].astype(np.int64)
            share = None if ranks is None else EdgeShare.of(source_e, partition.num_tokens, ranks, device)
            own = source_e, edges.target_E[slots], edges.temperature_E[slots]
            self._requests.append(request_edges(*own, device=device, extras=extras, share=share))
            self._shares.append(share)

    def read(self, model: Model, inputs: TreeInputs, partition: int) -> Read:
        """Run one partition; only source tokens of wanted edges go through the head."""
        per_edge = edge_values(model, inputs.model_kwargs(), lambda: self._requests[partition])
        share = self._shares[partition]
        outputs = EdgeOutputs.of_edges(per_edge)
        # The sum of an empty slice is 0 and has the graph, even if no edge is wanted.
        return outputs if share is None else outputs.map(share.gather), per_edge.log_prob[:0].sum()


class ValueReadout(Readout):
    """Values of all tokens, from a token classifier with one label."""

    def __init__(self, forest: Forest, plan: PartitionPlan, *, device: torch.device) -> None:
        slots_of = [partition.tokens for partition in plan.partitions]
        row_index_F = torch.from_numpy(forest.row_index.values.astype(np.int64)).to(device)
        every_F = torch.arange(forest.num_flat, device=device)
        reads = FlatReads(flat_W=every_F, edge_W=row_index_F, num_flat=forest.num_flat)
        super().__init__(slots_of, forest.num_unique, (VALUES,), reads, device)

    def read(self, model: Model, inputs: TreeInputs, partition: int) -> Read:
        """Run one partition and read the values of its tokens."""
        values_n = model(**inputs.model_kwargs()).logits[0, :, 0]
        values = inputs.of_all(values_n)[: len(self._slots_of[partition])]
        return EdgeOutputs(values=values), (values_n[:1] * 0).sum()
