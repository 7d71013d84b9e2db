"""The cheapest way to run a forest within a budget of bytes: whole, offloaded, tiled, or in partitions.

All ways that a forest has are put into one order, by predicted seconds; a budget takes the first that fits. What does
not depend on the budget cannot break the law: a smaller budget never has a higher predicted peak.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from tree_rl.cost.memory.model import MemoryModel, Peak
from tree_rl.cost.memory.partition_peak import PartitionedPeak
from tree_rl.cost.memory.saving import MemorySaving
from tree_rl.tree.forest import Forest
from tree_rl.tree.partition import PartitionPlan, plan_partitions

OPERATIONS_PER_SECOND = 4e14
"""Rate of a GPU at work; only its ratio to the next figure matters."""
HOST_BYTES_PER_SECOND = 4e10
"""Rate of copies to and from pinned host memory."""
DEVICE_BYTES_PER_SECOND = 3e12
WEIGHT_SUM_BYTES = 10
"""Read and written to add one weight's gradient of a tile to the float32 sum of tiles. Under checkpointing tiles cost
nothing else: the layer stops running again in front of its MLP."""
PARTITION_TOKENS = 512
"""One more forward and backward costs as much as so many tokens."""
RELAY_TRIPS = 4
"""Copies of a relayed token's keys and values that the device waits for: they leave, come for a child, leave again as
its past and come for its backward."""
TILE_TOKENS = (8192, 2048)
SLACK = 1.05
"""No budget counts as less than so many times the least that any way needs: the last few per cent cost the most."""
CAPACITY_BITS = 4
MOST_PARTITIONS = 512
"""No capacity is smaller than this share of the forest."""
PATIENCE, WORTH_CUTTING = 8, 0.98
"""So many capacities in a row, each smaller than the one before, that do not lower the peak so far end the search."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteBudget:
    """What a run may keep alive."""

    device: float
    """Bytes on the device, weights, gradients and optimizer state apart."""
    host: float = 0.0
    """Bytes in host memory, of what waits there."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryChoice:
    """One way to run a forest."""

    plan: PartitionPlan | None
    """Its partitions; None runs it in one forward."""
    saving: MemorySaving
    """What it does to need less memory."""
    peak: Peak
    """Predicted."""
    seconds: float
    """Predicted, of forward and backward."""
    needs_host: float = 0.0
    """Bytes of host memory that a cheaper way would need and the host does not have; 0 where it has them."""

    @property
    def order(self) -> tuple[float, float, float]:
        """Cheapest first; of equally cheap ones the one that leaves most where it is."""
        return self.seconds, self.peak.host, self.peak.device

    @property
    def kind(self) -> tuple[bool, bool, bool, bool]:
        """Whether it cuts, offloads, tiles, and puts relays on the host."""
        saving = self.saving
        return self.plan is not None, saving.offloaded_layers > 0, bool(saving.tile_tokens), saving.relays_on_host

    @property
    def name(self) -> str:
        """In words."""
        saving, layers = self.saving, self.saving.offloaded_layers
        parts = ["whole" if self.plan is None else f"{self.plan.num_partitions} partitions"]
        parts += [f"{layers} layers offloaded"] if layers else []
        parts += [f"MLP in tiles of {saving.tile_tokens} tokens"] if saving.tile_tokens else []
        parts += ["relays on the host"] if saving.relays_on_host else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chooser:
    """Chooses for one model."""

    model: MemoryModel
    """What a token keeps alive."""
    offload: bool | str = "auto"
    """`tree.offload`: True puts relays on the host always, False nothing."""
    host_bytes: float = math.inf
    """Host memory that this rank may fill."""

    def budget(self, tokens: int) -> ByteBudget:
        """`tree.max_tokens` in bytes."""
        return ByteBudget(device=self.model.bytes_of(tokens), host=self.host_bytes)

    def choose(self, forest: Forest, budget: ByteBudget, *, head_share: float = 1.0) -> MemoryChoice:
        """The cheapest way within the budget; where none fits, the cheapest of about the least predicted peak.

        Args:
            forest: N unique tokens.
            budget: in bytes.
            head_share: share of its tokens that the head reads.
        """
        fitting: list[MemoryChoice] = []
        refused: list[MemoryChoice] = []
        lowest, in_vain = math.inf, 0
        for least_seconds, choices in self._in_groups(forest, head_share):
            within = _cheapest(fitting, budget.device)
            if within is not None and within.seconds < least_seconds and budget.device >= SLACK * _least(fitting):
                break
            found = choices()
            if found[0].plan is not None:
                lower = _least(found)
                lowest, in_vain = (lower, 0) if lower < WORTH_CUTTING * lowest else (lowest, in_vain + 1)
                if in_vain > PATIENCE:
                    break
            fitting += [choice for choice in found if choice.peak.host <= budget.host]
            refused += [choice for choice in found if choice.peak.host > budget.host]
        limit = max(budget.device, SLACK * _least(fitting))
        chosen, beyond = _cheapest(fitting, limit), _cheapest(refused, limit)
        assert chosen is not None
        is_refused = beyond is not None and beyond.order < chosen.order
        return replace(chosen, needs_host=beyond.peak.host) if beyond is not None and is_refused else chosen

    def _in_groups(self, forest: Forest, head_share: float) -> Iterator[tuple[float, Callable[[], list[MemoryChoice]]]]:
        """Ways to run a forest, each group with a bound on its seconds, ascending; they are worked out when called."""
        yield 0.0, partial(self._whole, forest, head_share)
        tokens = forest.num_unique
        of_whole = self._seconds(forest)
        for capacity in capacities(tokens):
            more = -(-tokens // capacity) - 1
            bound = of_whole + more * self._partition_seconds
            yield bound, partial(self._at_capacity, forest, capacity, head_share)

    def _whole(self, forest: Forest, head_share: float) -> list[MemoryChoice]:
        tokens, seconds = forest.num_unique, self._seconds(forest)
        choices = []
        for tile in self._tiles(tokens):
            for layers in range(self.model.shape.layers + 1 if self._moves_inputs else 1):
                saving = MemorySaving(offloaded_layers=layers, tile_tokens=tile)
                peak = self.model.whole(tokens, round(head_share * tokens), saving)
                more = self._saving_seconds(tokens, seconds, saving)
                choices.append(MemoryChoice(plan=None, saving=saving, peak=peak, seconds=seconds + more))
        return choices

    def _at_capacity(self, forest: Forest, capacity: int, head_share: float) -> list[MemoryChoice]:
        plan = quick_plan(forest, capacity)
        tokens, seconds = forest.num_unique, self._seconds(forest)
        peaks = PartitionedPeak(self.model, plan, head_share=head_share)
        choices = []
        for saving in self._partition_savings(plan.capacity_tokens):
            peak = peaks.under(saving)
            more = self._saving_seconds(tokens, seconds, saving)
            more += (plan.num_partitions - 1) * self._partition_seconds
            if saving.relays_on_host:
                more += RELAY_TRIPS * self.model.relayed * plan.relayed_tokens / HOST_BYTES_PER_SECOND
            choices.append(MemoryChoice(plan=plan, saving=saving, peak=peak, seconds=seconds + more))
        return choices

    def _partition_savings(self, capacity: int) -> Iterator[MemorySaving]:
        layers = (0, self.model.shape.layers) if self._moves_inputs else (0,)
        relays = (True,) if self.offload is True else (False, True) if self._uses_host else (False,)
        for tile in self._tiles(capacity):
            for offloaded in layers:
                for on_host in relays:
                    yield MemorySaving(offloaded_layers=offloaded, tile_tokens=tile, relays_on_host=on_host)

    def _tiles(self, tokens: int) -> list[int | None]:
        return [
            None,
            *(tile for tile in TILE_TOKENS if self.model.tiles and self.model.checkpointing and tile < tokens),
        ]

    @property
    def _moves_inputs(self) -> bool:
        """Whether inputs of layers may wait on the host."""
        return self._uses_host and self.model.checkpointing

    @property
    def _uses_host(self) -> bool:
        return self.offload is not False and self.model.offloads

    def _seconds(self, forest: Forest) -> float:
        return self.model.shape.cost.forest(forest) / OPERATIONS_PER_SECOND

    @property
    def _partition_seconds(self) -> float:
        return PARTITION_TOKENS * self.model.shape.cost.per_token / OPERATIONS_PER_SECOND

    def _saving_seconds(self, tokens: int, seconds: float, saving: MemorySaving) -> float:
        """What offloading and tiles cost: copies that take longer than a layer's forward, and sums of gradients."""
        shape = self.model.shape
        copying = self.model.boundary * tokens / HOST_BYTES_PER_SECOND
        computing = seconds / (3 * shape.layers)
        more = 2 * saving.offloaded_layers * max(copying - computing, 0.0)
        if saving.tile_tokens is not None:
            added = WEIGHT_SUM_BYTES * 3 * shape.hidden * shape.intermediate * shape.layers
            more += -(-tokens // saving.tile_tokens) * added / DEVICE_BYTES_PER_SECOND
        return more


def quick_plan(forest: Forest, capacity: int) -> PartitionPlan:
    """Partitions without the solver: a choice compares many capacities."""
    return plan_partitions(forest, capacity, solver="heuristic")


def _cheapest(choices: list[MemoryChoice], device_bytes: float) -> MemoryChoice | None:
    within = [choice for choice in choices if choice.peak.device <= device_bytes]
    return min(within, key=lambda choice: choice.order, default=None)


def _least(choices: list[MemoryChoice]) -> float:
    return min((choice.peak.device for choice in choices), default=math.inf)


def capacities(tokens: int) -> list[int]:
    """Capacities of partitions below so many tokens, descending: eight sizes between a power of two and the next."""
    sizes = []
    size = _rounded_down(tokens - 1)
    while size >= max(tokens // MOST_PARTITIONS, 1):
        sizes.append(size)
        size = _rounded_down(size - 1)
    return sizes


def _rounded_down(tokens: int) -> int:
    """To a number of at most four binary digits, then zeros."""
    shift = max(tokens.bit_length() - CAPACITY_BITS, 0)
    return tokens >> shift << shift
