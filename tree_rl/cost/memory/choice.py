"""Chooses the cheapest way to run a forest within a memory budget: whole, offloaded, tiled, or in partitions.

All ways are sorted by predicted seconds, and the first that fits the budget is chosen. The order does not depend on
the budget, so a smaller budget never has a higher predicted peak.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from tree_rl.cost.memory.model import MemoryModel, MemorySaving, Peak
from tree_rl.cost.memory.partition_peak import PartitionedPeak
from tree_rl.tree.forest import Forest
from tree_rl.tree.partition import PartitionPlan, plan_partitions
from tree_rl.tree.report.counted import counted

OPERATIONS_PER_SECOND = 4e14
"""Throughput of a GPU; only its ratio to the next two constants matters."""
HOST_BYTES_PER_SECOND = 4e10
"""Bandwidth of copies to and from pinned host memory."""
DEVICE_BYTES_PER_SECOND = 3e12
WEIGHT_SUM_BYTES = 10
"""Bytes read and written per weight to add a tile's gradient to the float32 sum. With checkpointing tiles cost nothing
else, because recomputing a layer stops before its MLP."""
PARTITION_TOKENS = 512
"""Cost of one more forward and backward, in tokens."""
RELAY_TRIPS = 4
"""Blocking copies of a relayed token's keys and values: to the host, back for a child's forward, to the host again as
the child's past, back for the child's backward."""
TILE_TOKENS = (8192, 2048)
SLACK = 1.05
"""Smallest budget, as a multiple of the least peak of any way: the last few per cent of memory cost the most time."""
CAPACITY_BITS = 4
MOST_PARTITIONS = 512
"""The smallest capacity that is tried is the forest's tokens divided by this."""
PATIENCE, WORTH_CUTTING = 8, 0.98
"""The search stops after more than PATIENCE capacities in a row that do not reach WORTH_CUTTING of the lowest peak."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryChoice:
    """One way to run a forest."""

    plan: PartitionPlan | None
    """Partitions; None runs the forest in one forward."""
    saving: MemorySaving
    """Offloading and tiling."""
    peak: Peak
    """Predicted peak memory."""
    seconds: float
    """Predicted seconds of forward and backward."""
    needs_host: float = 0.0
    """Host memory in bytes that a cheaper way needs and the host does not have; 0 if there is no such way."""

    @property
    def order(self) -> tuple[float, float, float]:
        """Sort key: the cheapest way first, then the one with less on the host."""
        return self.seconds, self.peak.host, self.peak.device

    @property
    def kind(self) -> tuple[bool, bool, bool, bool]:
        """Flags: partitioned, offloaded, tiled, relays on the host."""
        saving = self.saving
        return self.plan is not None, saving.offloaded_layers > 0, bool(saving.tile_tokens), saving.relays_on_host

    @property
    def name(self) -> str:
        """Description for logs."""
        saving, layers = self.saving, self.saving.offloaded_layers
        parts = ["whole" if self.plan is None else counted(self.plan.num_partitions, "partition")]
        parts += [f"{counted(layers, 'layer')} offloaded"] if layers else []
        parts += [f"MLP in tiles of {saving.tile_tokens} tokens"] if saving.tile_tokens else []
        parts += ["relays on the host"] if saving.relays_on_host else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chooser:
    """Chooses how to run forests of one model."""

    model: MemoryModel
    """Predicts the memory of a forward and backward."""
    offload: bool | str = "auto"
    """`tree.offload`: True always puts relays on the host, False never uses host memory."""
    host_bytes: float = math.inf
    """Host memory in bytes that this rank may fill."""

    def choose(self, forest: Forest, max_tokens: int, *, head_share: float = 1.0) -> MemoryChoice:
        """The cheapest way in the memory of a whole forest of `max_tokens` tokens (`tree.max_tokens`); if none fits,
        the cheapest within `SLACK` of the least predicted peak.

        `head_share` is the share of the forest's tokens that the head reads.
        """
        device_bytes = self.model.bytes_of(max_tokens)
        fitting: list[MemoryChoice] = []
        refused: list[MemoryChoice] = []
        lowest, in_vain = math.inf, 0
        tokens, whole_seconds = forest.num_unique, self._seconds(forest)
        for capacity in (None, *capacities(tokens)):
            fewest_cuts = 0 if capacity is None else -(-tokens // capacity) - 1
            least_seconds = whole_seconds + fewest_cuts * self._partition_seconds
            within = _cheapest(fitting, device_bytes)
            if within is not None and within.seconds < least_seconds and device_bytes >= SLACK * _least(fitting):
                break
            found = self._ways(forest, capacity, head_share)
            if capacity is not None:
                lower = _least(found)
                lowest, in_vain = (lower, 0) if lower < WORTH_CUTTING * lowest else (lowest, in_vain + 1)
                if in_vain > PATIENCE:
                    break
            fitting += [choice for choice in found if choice.peak.host <= self.host_bytes]
            refused += [choice for choice in found if choice.peak.host > self.host_bytes]
        limit = max(device_bytes, SLACK * _least(fitting))
        chosen, beyond = _cheapest(fitting, limit), _cheapest(refused, limit)
        assert chosen is not None
        is_refused = beyond is not None and beyond.order < chosen.order
        return replace(chosen, needs_host=beyond.peak.host) if beyond is not None and is_refused else chosen

    def _ways(self, forest: Forest, capacity: int | None, head_share: float) -> list[MemoryChoice]:
        """All ways with partitions of at most `capacity` tokens; None: in one forward."""
        tokens, seconds = forest.num_unique, self._seconds(forest)
        plan = None if capacity is None else quick_plan(forest, capacity)
        peak_of: Callable[[MemorySaving], Peak] = partial(self.model.whole, tokens, round(head_share * tokens))
        if plan is not None:
            peak_of = PartitionedPeak(self.model, plan, head_share=head_share).under
        choices = []
        for saving in self._savings(plan, tokens):
            more = self._saving_seconds(tokens, seconds, saving)
            if plan is not None:
                more += (plan.num_partitions - 1) * self._partition_seconds
                if saving.relays_on_host:
                    more += RELAY_TRIPS * self.model.relayed * plan.relayed_tokens / HOST_BYTES_PER_SECOND
            choices.append(MemoryChoice(plan=plan, saving=saving, peak=peak_of(saving), seconds=seconds + more))
        return choices

    def _savings(self, plan: PartitionPlan | None, tokens: int) -> Iterator[MemorySaving]:
        """Any number of offloaded layers in one forward; all or none in partitions, where relays may be offloaded."""
        model, every = self.model, self.model.shape.layers
        uses_host = self.offload is not False and model.offloads
        moves_inputs, runs_tiles = uses_host and model.checkpointing, model.tiles and model.checkpointing
        layers = (0,) if not moves_inputs else range(every + 1) if plan is None else (0, every)
        relays = (self.offload is True, self.offload is True or uses_host) if plan is not None else (False,)
        most = tokens if plan is None else plan.capacity_tokens
        sizes = (None, *(tile for tile in TILE_TOKENS if runs_tiles and tile < most))
        for tile, offloaded, on_host in product(sizes, layers, dict.fromkeys(relays)):
            yield MemorySaving(offloaded_layers=offloaded, tile_tokens=tile, relays_on_host=on_host)

    def _seconds(self, forest: Forest) -> float:
        return self.model.shape.cost.forest(forest) / OPERATIONS_PER_SECOND

    @property
    def _partition_seconds(self) -> float:
        return PARTITION_TOKENS * self.model.shape.cost.per_token / OPERATIONS_PER_SECOND

    def _saving_seconds(self, tokens: int, seconds: float, saving: MemorySaving) -> float:
        """Extra seconds: copies where they take longer than a layer's forward, and the tiles' gradient sums."""
        shape = self.model.shape
        copying = self.model.boundary * tokens / HOST_BYTES_PER_SECOND
        computing = seconds / (3 * shape.layers)
        more = 2 * saving.offloaded_layers * max(copying - computing, 0.0)
        if saving.tile_tokens is not None:
            added = WEIGHT_SUM_BYTES * 3 * shape.hidden * shape.intermediate * shape.layers
            more += -(-tokens // saving.tile_tokens) * added / DEVICE_BYTES_PER_SECOND
        return more


def quick_plan(forest: Forest, capacity: int) -> PartitionPlan:
    """Partitions without the solver, which would be too slow for the many capacities that a choice compares."""
    return plan_partitions(forest, capacity, solver="heuristic")


def _cheapest(choices: list[MemoryChoice], device_bytes: float) -> MemoryChoice | None:
    within = [choice for choice in choices if choice.peak.device <= device_bytes]
    return min(within, key=lambda choice: choice.order, default=None)


def _least(choices: list[MemoryChoice]) -> float:
    return min((choice.peak.device for choice in choices), default=math.inf)


def capacities(tokens: int) -> list[int]:
    """Capacities below `tokens` to try, descending: eight between a power of two and the next."""
    sizes = []
    size = _rounded_down(tokens - 1)
    while size >= max(tokens // MOST_PARTITIONS, 1):
        sizes.append(size)
        size = _rounded_down(size - 1)
    return sizes


def _rounded_down(tokens: int) -> int:
    """Keep the four leading binary digits, set the others to zero."""
    shift = max(tokens.bit_length() - CAPACITY_BITS, 0)
    return tokens >> shift << shift
