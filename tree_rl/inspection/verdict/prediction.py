"""Predicts seconds and bytes of one update over the rows of a file, with and without trees, on GPUs of one kind.

The cost model is that of `tree-rl plan --ranks`; one step trains every row of the file once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tree_rl.cost.cluster.gpus import Gpu
from tree_rl.cost.cluster.parameters import Parameters
from tree_rl.cost.cluster.step import StepModel, StepTime
from tree_rl.cost.memory.budget import GRANULARITY, room_beside, rounded_tokens
from tree_rl.cost.memory.choice import Chooser
from tree_rl.inspection.model_shape import read_model_config
from tree_rl.inspection.overlap_by_group import forest_of, report_groups, rows_by_group, total_of
from tree_rl.inspection.row import Row
from tree_rl.inspection.scale.predict_scale import ScaleSettings, Step
from tree_rl.inspection.verdict.update_share import UpdateShare

LEAST_SHARE = 1e-6
"""Share of updates in a step below which the step's length cannot be derived from theirs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Least:
    """Memory that one GPU needs at least for the largest forward of one way to run, as `inspect --json` has it."""

    tokens: int
    """Tokens of that forward."""
    gpu_bytes: float
    """Bytes, including weights, gradients and optimizer state."""
    runs_as: str
    """The way to run, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPrediction:
    """Bytes on one GPU, as `inspect --json` has them."""

    gpu: Gpu
    gpus: int
    state_bytes: float
    """Bytes that do not depend on the rows: weights, gradients, optimizer state, gathered layers."""
    rows: Least
    """Need of the longest row by itself."""
    trees_whole: Least
    """Need of the group with the most unique tokens, in one forward."""
    trees_least: Least
    """Need of that group with all savings that use no host memory."""
    max_tokens: int | None
    """Unique tokens of a forward that fill 80 % of the GPU; None if not even the shortest forward fits."""
    largest_runs_as: str | None
    """How that group runs within `max_tokens`, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatePrediction:
    """One update and its whole step, with and without trees."""

    rows: StepTime
    trees: StepTime
    share: UpdateShare
    price: float | None
    """Price of one GPU for an hour."""
    gpus: int

    @property
    def speed_up(self) -> float:
        """Speed-up of the update."""
        return self.rows.total / self.trees.total

    @property
    def steps(self) -> list["WholeStep"]:
        """The whole step for each share that updates may have in it."""
        return [WholeStep(update=self, share=share) for share in self.share.shares]


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeStep:
    """A whole step with and without trees, if updates take some share of the step without trees."""

    update: UpdatePrediction
    share: float

    @property
    def seconds(self) -> tuple[float | None, float | None]:
        """Seconds without and with trees; None if updates take no share of a step."""
        if self.share < LEAST_SHARE:
            return None, None
        rows, trees = self.update.rows.total, self.update.trees.total
        flat = rows / self.share
        return flat, flat - rows + trees

    @property
    def price(self) -> tuple[float | None, float | None]:
        """Price without and with trees; None if no price per GPU is given."""
        flat, tree = self.seconds
        if self.update.price is None or flat is None or tree is None:
            return None, None
        hourly = self.update.gpus * self.update.price
        return flat / 3600 * hourly, tree / 3600 * hourly

    @property
    def speed_up(self) -> float:
        """Speed-up of the step."""
        return self.update.share.step_speed_up(self.update.speed_up, self.share)


def predict_memory(rows: Sequence[Row], path: Path, gpu: Gpu, gpus: int) -> MemoryPrediction:
    """Bytes on each of `gpus` GPUs that train a model with FSDP2; raises InputError if its config cannot be read."""
    shape, config = read_model_config(path)
    model = StepModel(shape=shape, parameters=Parameters.of(shape, config), cluster=gpu.spec.cluster(gpus))
    activations = model.activations
    forests = [
        forest_of([rows[index] for index in members]) for members in rows_by_group(row.group for row in rows).values()
    ]
    largest = max(forests, key=lambda forest: forest.num_unique)
    longest = max(len(row.token_ids) for row in rows)
    chooser = Chooser(model=activations)
    least = Chooser(model=activations, host_bytes=0.0).choose(largest, 0)
    tokens = largest.num_unique if least.plan is None else max(part.num_tokens for part in least.plan.partitions)
    state = model.state_bytes
    room = room_beside(state, model.cluster.memory)
    fits = room >= activations.bytes_of(GRANULARITY)
    max_tokens = rounded_tokens(activations.tokens_of(room)) if fits else None
    runs = None
    if max_tokens is not None:
        is_whole = largest.num_unique <= max_tokens
        runs = "whole" if is_whole else chooser.choose(largest, max_tokens).name
    return MemoryPrediction(
        gpu=gpu,
        gpus=gpus,
        state_bytes=state,
        rows=Least(tokens=longest, gpu_bytes=state + activations.bytes_of(longest), runs_as="the longest row"),
        trees_whole=Least(
            tokens=largest.num_unique,
            gpu_bytes=state + activations.bytes_of(largest.num_unique),
            runs_as="the largest group, whole",
        ),
        trees_least=Least(tokens=tokens, gpu_bytes=state + least.peak.device, runs_as=least.name),
        max_tokens=max_tokens,
        largest_runs_as=runs,
    )


def predict_update(
    rows: Sequence[Row], model: Path, memory: MemoryPrediction, share: UpdateShare, price: float | None
) -> UpdatePrediction:
    """Seconds of an update over the rows, including log-probs and optimizer, with micro-batches of `memory.max_tokens`.

    With and without trees, the head reads only tokens with a loss. `share` is the updates' share of a step without
    trees, and `price` that of one GPU for an hour.
    """
    overlap = total_of(report_groups(list(rows))).overlap
    cluster, max_tokens = memory.gpu.spec.cluster(memory.gpus), memory.max_tokens or GRANULARITY

    def time(*, shared: bool, head_share: float) -> StepTime:
        settings = ScaleSettings(cluster, max_tokens=max_tokens, shared=shared, head_share=head_share)
        return Step(rows, model, settings).on(memory.gpus, 1).time

    return UpdatePrediction(
        rows=time(shared=False, head_share=overlap.flat_head_tokens / overlap.flat_tokens),
        trees=time(shared=True, head_share=overlap.unique_head_tokens / overlap.unique_tokens),
        share=share,
        price=price,
        gpus=memory.gpus,
    )
