"""Predicted seconds and bytes of a training step under FSDP2: log-probs, forward, backward and AdamW on D GPUs.

All ranks run in lock-step, so the slowest rank of each mini-batch decides. Parameters of a layer are gathered in bf16
while the layer before computes, before each forward and again before each backward; gradients are scattered in float32
while the next layer computes. What is longer than the computation is exposed. Ranks that share tokens (S of them)
exchange queries, keys, values and results of attention, which nothing hides.
Legend: D GPUs, S of them share tokens, C mini-batches.
"""

from dataclasses import dataclass, replace

import numpy as np

from tree_rl.cost.balance.batch import BatchLayout
from tree_rl.cost.cluster.hardware import OPTIMIZER_RATE, Cluster
from tree_rl.cost.cluster.parameters import Parameters
from tree_rl.cost.cost_model import FORWARD_AND_BACKWARD, ModelShape
from tree_rl.cost.memory.model import MemoryModel, assumed_memory_model

FORWARDS = {"log_probs": 1, "forward": 1, "backward": 3}
"""A pass in forwards' time: a backward computes each layer again first."""
GATHERED, REDUCED = 2, 4
"""Bytes of a parameter on its way: bf16 weights, float32 gradients."""
KEPT = 16
"""Bytes of a parameter on all its shards: float32 weight and gradient, two moments of AdamW."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepWork:
    """What the ranks compute in a step, from the trainer's own layout; S GPUs that share tokens are one rank here."""

    load_C: np.ndarray
    """float64 [C], operations of the slowest rank's forward and backward, in the unit of `ModelShape.cost`."""
    mean_C: np.ndarray
    """float64 [C], mean of the ranks."""
    forwards_C: np.ndarray
    """int64 [C], micro-batches of a mini-batch: tokens of the fullest rank over the budget."""
    tokens_C: np.ndarray
    """int64 [C], unique tokens of the fullest rank."""
    budget: int
    """Unique tokens of a micro-batch."""

    @classmethod
    def of(cls, layout: BatchLayout, budget: int) -> "StepWork":
        """Of the layout of a step's rows."""
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
    """Seconds of a step by cause; they add up to the step."""

    balanced: float
    """Computation, if all ranks had equal work."""
    waiting: float
    """For the slowest rank of each mini-batch."""
    gathers: float
    """Parameters and gradients on their way that no computation hides."""
    exchanges: float
    """Between ranks that share tokens."""
    optimizer: float

    @property
    def total(self) -> float:
        """The step."""
        return self.balanced + self.waiting + self.gathers + self.exchanges + self.optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Bytes of one GPU."""

    state: float
    """Its shards of weights, gradients and optimizer state."""
    gathered: float
    """Whole layers while they run, embedding and head."""
    activations: float
    """Activations of one micro-batch, by the memory model."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.state + self.gathered + self.activations


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Updates of a run."""

    sharing: int
    """S."""
    per_forward: float
    """Seconds of a micro-batch, however small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepModel:
    """A model on a cluster."""

    shape: ModelShape
    parameters: Parameters
    cluster: Cluster
    sharing: int = 1
    """S."""
    shards: int | None = None
    """GPUs that hold one copy of the parameters (verl's `fsdp_size`); None: all."""
    log_probs: bool = True
    """True if a pass for old log-probs comes first."""
    measured: Measured | None = None
    """Where the work's unit is seconds of a run's updates: gathers are then part of them, and exchanges of its S."""

    @property
    def shard_ranks(self) -> int:
        """GPUs that hold one copy of the parameters."""
        return self.shards or self.cluster.gpus

    @property
    def rate(self) -> float:
        """Of S GPUs, in the work's unit a second."""
        if self.measured is None:
            return self.cluster.flops * self.sharing
        # The unit is a second of an update on so many GPUs: four forwards, where operations count three.
        return (FORWARD_AND_BACKWARD + 1) / FORWARD_AND_BACKWARD * self.sharing / self.measured.sharing

    def time(self, work: StepWork) -> StepTime:
        """Seconds of a step."""
        rate = self.rate
        passes = (FORWARD_AND_BACKWARD + 1 + self.log_probs) / FORWARD_AND_BACKWARD
        fixed = 0.0 if self.measured is None else self.measured.per_forward * float(work.forwards_C.sum())
        slowest, mean = (float(load.sum()) * passes / rate + fixed for load in (work.load_C, work.mean_C))
        gathers = exchanges = 0.0
        for load, forwards, tokens in zip(work.load_C, work.forwards_C, work.tokens_C, strict=True):
            forward = float(load) / FORWARD_AND_BACKWARD / rate / forwards
            if self.measured is None:
                gathers += self.exposed(forward, sends_gradients=True) * int(forwards)
                gathers += self.exposed(forward, sends_gradients=False) * int(forwards) * self.log_probs
            if self.measured is None or self.measured.sharing != self.sharing:
                exchanges += self.exchange(int(tokens)) * (FORWARD_AND_BACKWARD + self.log_probs)
        optimizer = len(work.load_C) * self.parameters.total / self.shard_ranks / OPTIMIZER_RATE
        return StepTime(
            balanced=mean, waiting=slowest - mean, gathers=gathers, exchanges=exchanges, optimizer=optimizer
        )

    def exposed(self, forward: float, *, sends_gradients: bool) -> float:
        """Seconds of one micro-batch in which parameters or gradients travel and nothing computes.

        Args:
            forward: seconds that its layers compute in one forward.
            sends_gradients: a backward follows. Without: a pass for log-probs.
        """
        layers, ranks = self.parameters.layers, self.shard_ranks
        layer = self.cluster.collective(GATHERED * self.parameters.per_layer, ranks)
        root = self.cluster.collective(GATHERED * self.parameters.root, ranks)
        one = forward / layers
        exposed = root + layer + (layers - 1) * max(layer - one, 0.0)
        if sends_gradients:
            sent = self.cluster.collective(REDUCED * self.parameters.per_layer, ranks) + self._replicas()
            last = self.cluster.collective(REDUCED * self.parameters.root, ranks)
            exposed += layer + layers * max(layer + sent - FORWARDS["backward"] * one, 0.0) + sent + last
        return exposed

    def exchange(self, tokens: int) -> float:
        """Seconds in which S ranks exchange heads for tokens in all layers with attention, in one pass."""
        if self.sharing == 1:
            return 0.0
        shape = self.shape
        heads = 2 * shape.heads + 2 * max(shape.kv_heads, self.sharing)
        held = GATHERED * heads * shape.head_dim * tokens / self.sharing
        # Queries, keys, values and the result are sent one by one.
        return shape.num_attention_layers * (self.cluster.collective(held, self.sharing) + 3 * self.cluster.latency)

    def memory(self, work: StepWork) -> DeviceMemory:
        """Bytes of one GPU at the peak, with the largest micro-batch."""
        return self.memory_with(self.activations.whole(int(min(work.budget, work.tokens_C.max()))).device)

    @property
    def activations(self) -> MemoryModel:
        """What a forward and backward keep alive."""
        return replace(assumed_memory_model(self.shape), sequence_ranks=self.sharing)

    def memory_with(self, activations: float) -> DeviceMemory:
        """Bytes of one GPU whose activations take so many."""
        # A layer's weights and those of the next, gathered; the float32 gradients of one.
        gathered = (2 * GATHERED + REDUCED) * self.parameters.per_layer + (GATHERED + REDUCED) * self.parameters.root
        return DeviceMemory(
            state=KEPT * self.parameters.total / self.shard_ranks,
            gathered=gathered if self.shard_ranks > 1 else 0.0,
            activations=activations,
        )

    def _replicas(self) -> float:
        """Seconds of the all-reduce of a layer's gradient shards among replicas: a reduce-scatter and a gather."""
        replicas = self.cluster.gpus // self.shard_ranks
        if replicas == 1:
            return 0.0
        between = replace(self.cluster, gpus_per_node=max(self.cluster.gpus_per_node // self.shard_ranks, 1))
        return 2 * between.collective(REDUCED * self.parameters.per_layer / self.shard_ranks, replicas)
