"""`tree-rl plan --ranks`: predicts a step on a cluster, its slowest rank, what would help, the first bottleneck."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from tree_rl.cost.balance.batch import BatchLayout, lay_out_groups, paths_of_groups
from tree_rl.cost.cluster.hardware import Cluster
from tree_rl.cost.cluster.parameters import Parameters
from tree_rl.cost.cluster.step import Measured, StepModel, StepTime, StepWork
from tree_rl.cost.memory.model import GIB
from tree_rl.inspection.files import InputError
from tree_rl.inspection.model_shape import read_model_config
from tree_rl.inspection.overlap_by_group import rows_by_group
from tree_rl.inspection.row import Row
from tree_rl.inspection.scale.fitted_costs import read_fitted_cost
from tree_rl.inspection.text import format_table
from tree_rl.tree.report.counted import counted

SHARING = (1, 2, 4, 8)
"""Tried numbers of ranks that share tokens."""
NOTABLE = 0.1
"""Least share of a step that is reported as a loss."""
LEAST_HELP = 0.02
"""Share of a step below which another S is not advised."""
TIMES = ("computes", "waits", "gathers", "exchanges", "optimizer")
HEADER = ("GPUs", "S", "step s", *TIMES, "imbalance", "GiB", "slowed by")


@dataclass(frozen=True, slots=True)
class ScaleSettings:
    """Options of a run on the command line."""

    cluster: Cluster
    sharing: int = 1
    """S: verl's ulysses_sequence_parallel_size."""
    shards: int | None = None
    """verl's fsdp_size; None: all GPUs."""
    mini_batches: int = 1
    prompts: int | None = None
    """Groups per step, drawn from the file; None: each once."""
    max_tokens: int = 65_536
    """Unique tokens of a micro-batch."""
    checkpoint: Path | None = None
    """Checkpoint of a run of this model, whose measured costs are used."""
    shared: bool = True
    """True if the rows of a group share prefixes; False: every row runs by itself, as without trees."""
    head_share: float = 1.0
    """Share of the tokens that the language-model head reads."""


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A predicted step on one cluster."""

    model: StepModel
    work: StepWork
    layout: BatchLayout

    @cached_property
    def time(self) -> StepTime:
        """Seconds by cause."""
        return self.model.time(self.work)

    @cached_property
    def memory(self) -> float:
        """Bytes on one GPU."""
        return self.model.memory(self.work)

    @property
    def fits(self) -> bool:
        """True if a GPU has enough memory."""
        return self.memory <= self.model.cluster.memory

    @property
    def slowed_by(self) -> str:
        """Largest loss of more than a tenth of the step, "memory" if it does not fit; empty without either."""
        if not self.fits:
            return "memory"
        time = self.time
        one_row = float(self.layout.bound_C.sum()) > 0.95 * float(self.work.load_C.sum())
        losses = {
            "the longest trajectory" if one_row else "imbalance": time.waiting,
            "FSDP's gathers": time.gathers,
            "sharing tokens": time.exchanges,
        }
        name = max(losses, key=lambda loss: losses[loss])
        return name if losses[name] > NOTABLE * time.total else ""


class Step:
    """Rows of a training step, whose work is computed once for all clusters."""

    def __init__(self, rows: Sequence[Row], model: Path | None, settings: ScaleSettings) -> None:
        """Compute the work of the groups; raises an InputError without rows, a readable model, or costs to read."""
        if model is None:
            raise InputError("--ranks needs --model, whose sizes decide the costs; name a config.json")
        if not rows:
            raise InputError("--ranks needs rows, found none; name a file with some")
        self.shape, config = read_model_config(model)
        self.parameters = Parameters.of(self.shape, config)
        self.settings = settings
        number = np.zeros(len(rows), dtype=np.int64)
        groups = [[index] for index in range(len(rows))]
        if settings.shared:
            groups = list(rows_by_group(row.group for row in rows).values())
        for group, members in enumerate(groups):
            number[members] = group
        cost, self.measured = self.shape.cost, None
        cost = replace(cost, per_head_token=settings.head_share * cost.per_head_token)
        if settings.checkpoint is not None:
            cost, sharing = read_fitted_cost(settings.checkpoint, self.shape)
            self.measured = Measured(sharing=sharing, per_forward=cost.per_forward)
        found = paths_of_groups(number, [row.token_ids for row in rows], cost)
        chosen = _drawn(len(groups), settings.prompts)
        self.paths = [found[group] for group in chosen]
        self.group_of_row = np.repeat(np.arange(len(chosen)), [len(groups[group]) for group in chosen])

    def on(self, gpus: int, sharing: int) -> Scaled:
        """The step on `gpus` GPUs, of which `sharing` at a time share tokens."""
        settings = self.settings
        ranks = gpus // sharing
        layout = lay_out_groups(self.group_of_row, self.paths, num_ranks=ranks, num_cells=settings.mini_batches)
        model = StepModel(
            shape=self.shape,
            parameters=self.parameters,
            cluster=replace(settings.cluster, gpus=gpus),
            sharing=sharing,
            shards=None if settings.shards is None else min(settings.shards, gpus),
            measured=self.measured,
        )
        return Scaled(model=model, work=StepWork.of(layout, settings.max_tokens), layout=layout)

    def alternatives(self, gpus: int) -> Iterator[Scaled]:
        """The step with every S that divides GPUs and heads and fits on one node."""
        for sharing in SHARING:
            fits = gpus % sharing == 0 and self.shape.heads % sharing == 0
            if fits and sharing <= self.settings.cluster.gpus_per_node:
                yield self.on(gpus, sharing)


def predict_scale(
    rows: Sequence[Row], model: Path | None, settings: ScaleSettings, *, sweep: bool = False
) -> tuple[list[Scaled], list[str]]:
    """The step on the cluster with every S, and sentences that explain it and say what would help.

    `sweep` predicts smaller clusters too, each with its fastest S, and names the first bottleneck. Raises an InputError
    if S does not divide GPUs or heads, or as `Step`.
    """
    gpus, sharing = settings.cluster.gpus, settings.sharing
    step = Step(rows, model, settings)
    if gpus % sharing or step.shape.heads % sharing:
        raise InputError(f"--sp {sharing}: expected a divisor of {gpus} GPUs and {step.shape.heads} heads")
    if settings.shards is not None and gpus % settings.shards:
        raise InputError(f"--shards {settings.shards}: expected a divisor of {gpus} GPUs, as verl's fsdp_size")
    if sweep:
        return _sweep(step, gpus)
    found = {one.model.sharing: one for one in step.alternatives(gpus)}
    asked = found.get(sharing) or step.on(gpus, sharing)
    found[sharing] = asked
    advice = [f"Would help: {advice}." for advice in _advice(step, asked, list(found.values()))]
    return [one for _, one in sorted(found.items())], [*_explained(asked), *(advice or ["Nothing to gain."])]


def format_scale(steps: Sequence[Scaled], said: Sequence[str]) -> str:
    """The result of `predict_scale` as text."""
    return "\n".join([format_table(HEADER, [_cells(one) for one in steps]), "", *said])


def _sweep(step: Step, most: int) -> tuple[list[Scaled], list[str]]:
    sizes = [step.settings.cluster.gpus_per_node]
    while sizes[-1] * 8 <= most:
        sizes.append(sizes[-1] * 8)
    if most not in sizes:
        sizes = [size for size in sizes if size < most] + [most]
    best = [min(step.alternatives(size), key=lambda one: (not one.fits, one.time.total)) for size in sizes]
    said = "S is the fastest of those that fit."
    broken = [one for one in best if one.slowed_by]
    if not broken:
        return best, [said, f"Nothing costs a tenth of a step up to {counted(most, 'GPU')}."]
    first = broken[0]
    return best, [said, f"First to break: {first.slowed_by}, on {counted(first.model.cluster.gpus, 'GPU')}."]


def _cells(one: Scaled) -> tuple[str, ...]:
    return (
        f"{one.model.cluster.gpus:,}",
        str(one.model.sharing),
        f"{one.time.total:.2f}",
        *(f"{part:.2f}" for part in astuple(one.time)),
        f"{one.layout.imbalance:.2f}",
        f"{one.memory / GIB:.0f}",
        one.slowed_by or "-",
    )


def _explained(asked: Scaled) -> list[str]:
    layout = asked.layout
    again = counted(layout.repeated_tokens, "token")
    slowest = layout.load_DC.sum(axis=1).argmax()
    tokens = counted(int(layout.tokens_DC[slowest].sum()), "token")
    forwards = counted(int(asked.work.forwards_C.sum()), "micro-batch")
    return [
        f"S = {asked.model.sharing}: {counted(layout.split_groups, 'group')} split over ranks, {again} computed again.",
        f"Slowest rank: {slowest} of {len(layout.load_DC)}, {tokens} in {forwards}; no layout is faster than "
        f"{layout.least_imbalance:.2f} times the mean.",
    ]


def _advice(step: Step, asked: Scaled, others: Sequence[Scaled]) -> Iterator[str]:
    fitting = [one for one in others if one.fits]
    ordered = sorted(fitting or others, key=lambda one: one.model.sharing)
    least = min(one.time.total for one in ordered)
    best = next(one for one in ordered if one.time.total * (1 - LEAST_HELP) <= least)
    if best.fits and not asked.fits:
        yield f"--sp {best.model.sharing}, which fits in memory ({best.time.total:.2f} s)"
    elif best.time.total < (1 - LEAST_HELP) * asked.time.total:
        yield f"--sp {best.model.sharing} ({best.time.total:.2f} s instead of {asked.time.total:.2f})"
    if asked.time.waiting > NOTABLE * asked.time.total:
        if step.settings.mini_batches > 1:
            yield "fewer mini-batches, which leave the balance more choice"
        elif best is asked:
            yield "more prompts in a step"
    if asked.time.gathers > NOTABLE * asked.time.total:
        fewer = "a larger --max-tokens (fewer micro-batches), " if fitting and asked.work.forwards_C.max() > 1 else ""
        yield f"{fewer}more prompts in a step, or fsdp_size within a node (--shards)"
    if not fitting:
        yield "a smaller --max-tokens, or more GPUs"


def _drawn(groups: int, wanted: int | None) -> list[int]:
    """Indices of the groups of a step: each once, or `wanted` draws whose counts differ by at most one."""
    if wanted is None:
        return list(range(groups))
    rounds = -(-wanted // groups)
    order = np.random.default_rng(0)
    return [int(group) for _ in range(rounds) for group in order.permutation(groups)][:wanted]
