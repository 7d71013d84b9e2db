"""Predicted seconds and bytes of a training step under FSDP2: log-probs, forward, backward and AdamW.

All ranks run in lock-step, so the slowest rank of each mini-batch decides. A layer's parameters are gathered in bf16
while the previous layer computes, before each forward and each backward. Gradients are reduce-scattered in float32
while the next layer computes. Communication that takes longer than the computation is exposed. Ranks under sequence
parallelism also exchange queries, keys, values and attention outputs, which nothing overlaps.
Legend: S ranks of a sequence-parallel group, which share tokens, C mini-batches.
"""

from dataclasses import dataclass, replace

import numpy as np

from tree_rl.cost.balance.batch import BatchLayout
from tree_rl.cost.cluster.hardware import OPTIMIZER_RATE, Cluster
from tree_rl.cost.cluster.parameters import Parameters
from tree_rl.cost.cost_model import FORWARD_AND_BACKWARD, ModelShape
from tree_rl.cost.memory.model import MemoryModel, assumed_memory_model

BACKWARD = 3
"""Time of a backward, which includes recomputing each layer, in units of a forward."""
GATHERED, REDUCED = 2, 4
"""Bytes per communicated parameter: bf16 weights, float32 gradients."""
KEPT = 16
"""Bytes of state per parameter: float32 weight, gradient and the two AdamW moments."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepWork:
    """Work of a step, from the trainer's layout; S GPUs that share tokens count as one rank here."""

    load_C: np.ndarray
    """float64 [C], cost of the slowest rank's forward and backward, in the unit of the cost model."""
    mean_C: np.ndarray
    """float64 [C], mean cost over ranks."""
    forwards_C: np.ndarray
    """int64 [C], micro-batches per mini-batch on the rank with the most tokens."""
    tokens_C: np.ndarray
    """int64 [C], most unique tokens on a rank."""
    budget: int
    """Most unique tokens of a micro-batch."""

    @classmethod
    def of(cls, layout: BatchLayout, budget: int) -> "StepWork":
        """Work of a batch with this layout."""
        tokens_C = layout.tokens_DC.max(axis=0)
        return cls(
            load_C=layout.load_DC.max(axis=0),
            mean_C=layout.load_DC.mean(axis=0),
            forwards_C=np.maximum(-(-tokens_C // budget), 1),
            tokens_C=tokens_C,
            budget=budget,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step by cause."""

    balanced: float
    """Seconds of computation if all ranks had equal work."""
    waiting: float
    """Seconds spent waiting for the slowest rank of each mini-batch."""
    gathers: float
    """Seconds of parameter and gradient communication that computation does not hide."""
    exchanges: float
    """Seconds of exchanges between ranks that share tokens."""
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.balanced + self.waiting + self.gathers + self.exchanges + self.optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The run whose measured seconds are the unit of work."""

    sharing: int
    """S of that run."""
    per_forward: float
    """Fixed seconds per micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepModel:
    """A model on a cluster."""

    shape: ModelShape
    parameters: Parameters
    cluster: Cluster
    sharing: int = 1
    """S, GPUs that share tokens."""
    shards: int | None = None
    """GPUs over which one copy of the parameters is sharded (verl's `fsdp_size`); None: all."""
    measured: Measured | None = None
    """Set if the unit of work is measured seconds, which include the gathers, and the exchanges for the run's S."""

    @property
    def shard_ranks(self) -> int:
        """GPUs over which one copy of the parameters is sharded."""
        return self.shards or self.cluster.gpus

    @property
    def rate(self) -> float:
        """Throughput of S GPUs, in units of work per second."""
        if self.measured is None:
            return self.cluster.flops * self.sharing
        # A measured second is part of an update on the run's S GPUs, recomputation included: four forwards, not three.
        return (FORWARD_AND_BACKWARD + 1) / FORWARD_AND_BACKWARD * self.sharing / self.measured.sharing

    def time(self, work: StepWork) -> StepTime:
        """Predict the seconds of a step."""
        rate = self.rate
        # Log-probs and recomputed layers are a forward each.
        passes = (FORWARD_AND_BACKWARD + 2) / FORWARD_AND_BACKWARD
        fixed = 0.0 if self.measured is None else self.measured.per_forward * float(work.forwards_C.sum())
        slowest, mean = (float(load.sum()) * passes / rate + fixed for load in (work.load_C, work.mean_C))
        gathers = exchanges = 0.0
        for load, forwards, tokens in zip(work.load_C, work.forwards_C, work.tokens_C, strict=True):
            forward = float(load) / FORWARD_AND_BACKWARD / rate / forwards
            if self.measured is None:
                gathers += self.exposed(forward, sends_gradients=True) * int(forwards)
                gathers += self.exposed(forward, sends_gradients=False) * int(forwards)
            if self.measured is None or self.measured.sharing != self.sharing:
                exchanges += self.exchange(int(tokens)) * (FORWARD_AND_BACKWARD + 1)
        optimizer = len(work.load_C) * self.parameters.total / self.shard_ranks / OPTIMIZER_RATE
        return StepTime(
            balanced=mean, waiting=max(slowest - mean, 0.0), gathers=gathers, exchanges=exchanges, optimizer=optimizer
        )

    def exposed(self, forward: float, *, sends_gradients: bool) -> float:
        """Seconds per micro-batch in which the GPU only communicates parameters or gradients.

        Args:
            forward: seconds of computation in one forward.
            sends_gradients: True with a backward, False for a pass for log-probs.
        """
        layers, ranks = self.parameters.layers, self.shard_ranks
        layer = self.cluster.collective(GATHERED * self.parameters.per_layer, ranks)
        root = self.cluster.collective(GATHERED * self.parameters.root, ranks)
        one = forward / layers
        exposed = root + layer + (layers - 1) * max(layer - one, 0.0)
        if sends_gradients:
            sent = self.cluster.collective(REDUCED * self.parameters.per_layer, ranks) + self._replicas()
            last = self.cluster.collective(REDUCED * self.parameters.root, ranks)
            exposed += layer + layers * max(layer + sent - BACKWARD * one, 0.0) + sent + last
        return exposed

    def exchange(self, tokens: int) -> float:
        """Seconds of the all-to-alls between S ranks in all attention layers of one pass."""
        if self.sharing == 1:
            return 0.0
        shape = self.shape
        heads = shape.heads + max(shape.kv_heads, self.sharing)
        held = GATHERED * heads * (shape.head_dim + shape.value_size) * tokens / self.sharing
        # Queries, keys, values and the output take one all-to-all each.
        return shape.num_attention_layers * (self.cluster.collective(held, self.sharing) + 3 * self.cluster.latency)

    def memory(self, work: StepWork) -> float:
        """Peak bytes of one GPU, with the largest micro-batch."""
        return self.state_bytes + self.activations.bytes_of(int(min(work.budget, work.tokens_C.max())))

    @property
    def activations(self) -> MemoryModel:
        """Memory model of a forward and backward."""
        return replace(assumed_memory_model(self.shape), sequence_ranks=self.sharing)

    @property
    def state_bytes(self) -> float:
        """Bytes of one GPU without activations: shards of weights, gradients and optimizer state, gathered layers."""
        shards = KEPT * self.parameters.total / self.shard_ranks
        if self.shard_ranks == 1:
            return shards
        # The gathered weights of two layers, the running and the next one, and the float32 gradients of one.
        layers = (2 * GATHERED + REDUCED) * self.parameters.per_layer
        return shards + layers + (GATHERED + REDUCED) * self.parameters.root

    def _replicas(self) -> float:
        """Seconds to all-reduce a layer's gradient shards among replicas: a reduce-scatter and an all-gather."""
        replicas = self.cluster.gpus // self.shard_ranks
        if replicas == 1:
            return 0.0
        between = replace(self.cluster, gpus_per_node=max(self.cluster.gpus_per_node // self.shard_ranks, 1))
        return 2 * between.collective(REDUCED * self.parameters.per_layer / self.shard_ranks, replicas)
