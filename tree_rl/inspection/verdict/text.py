"""Verdicts and predictions as plain text."""

from collections.abc import Iterator

from tree_rl.cost.memory.budget import MEMORY_FRACTION
from tree_rl.cost.memory.model import GIB
from tree_rl.inspection.files.quoting import escaped
from tree_rl.inspection.text import format_table
from tree_rl.inspection.verdict.judgement import REACHED, Verdict
from tree_rl.inspection.verdict.prediction import MemoryPrediction, UpdatePrediction

NAME_LENGTH = 40


def format_verdict(verdict: Verdict, assumed: str) -> str:
    """The closing lines of `tree-rl inspect`; `assumed` names the model of the FLOP bound."""
    taken = "\n              ".join(escaped(str(taken)) for taken in verdict.recording.taken)
    says = "trees help" if verdict.helps else "trees would save little"
    if not verdict.trains:
        says = "no token trains: no turn of an assistant, or masks of zeros"
    says += "" if verdict.recording.has_groups else ", if these are the groups"
    share = verdict.share
    lines = [
        f"Verdict: {says}. Expected: updates {verdict.update:.2f} times as fast, whole steps {verdict.step:.2f} times.",
        f"  taken       {taken}",
        f"  bounds      {verdict.token_bound:.2f}x by tokens, {verdict.flop_bound:.2f}x by operations ({assumed})",
        f"  update      {verdict.update:.2f}x: measured updates reached {REACHED[0]:.2f} to {REACHED[1]:.2f} of the "
        "bound by operations",
        f"  whole step  {verdict.step:.2f}x if updates take {share.share:.0%} of a step ({escaped(share.source)})",
    ]
    if verdict.equal_rows:
        equal = f"{verdict.equal_rows:,} of {len(verdict.recording.rows):,} rows repeat another row of their group"
        lines.append(f"  equal rows  {equal}: duplicates count in the bounds; drop those that were not sampled twice")
    if verdict.memory is None:
        lines.append("  memory      --model CONFIG predicts it, with the best max_tokens")
    lines.append(f"  next        {escaped(verdict.next_command)}")
    return "\n".join(lines)


def format_missing_group(verdict: Verdict) -> str:
    """A warning that no column names the group, and a table of the columns that could."""
    warning = (
        "Warning: no column uid, group, group_id or task_id names the group of a row, so each file counts as one "
        "group. Training merges the rows of one prompt: the figures below may be too high or too low."
    )
    if not verdict.regrouped:
        return f"{warning}\nNo other column has a text or an integer in every row that could name it (--group-by)."
    cells = [(escaped(one.column, NAME_LENGTH), f"{one.groups:,}", f"{one.por:.3f}") for one in verdict.regrouped]
    return f"{warning}\n\n" + format_table(("--group-by", "groups", "POR"), cells)


def format_prediction(memory: MemoryPrediction, update: UpdatePrediction | None) -> str:
    """Predicted seconds, price (both only if a token trains) and memory of a step on the chosen GPUs."""
    times = [] if update is None else [*_update_table(update), ""]
    head = f"{memory.gpus} x {memory.gpu.value} ({memory.gpu.spec.memory_gib:.0f} GiB). "
    head += "One step trains every row of the file once."
    return "\n".join([head, "", *times, *_memory_table(memory), "", *_notes(memory, update)])


def _update_table(update: UpdatePrediction) -> Iterator[str]:
    share = update.share
    cells = [
        [name, f"{time.total:,.2f}", _figure(step), _figure(price), _figure(None if price is None else 100 * price)]
        for name, time, step, price in zip(
            ("rows", "trees"), (update.rows, update.trees), update.step_seconds, update.step_price, strict=True
        )
    ]
    faster = [f"{update.speed_up:.2f}x", f"{share.step_speed_up(update.speed_up):.2f}x"]
    cells.append(["trees are faster", *faster, "", ""])
    yield format_table(("", "update s", "whole step s", "price a step", "of 100 steps"), cells)
    yield f"Updates take {share.share:.0%} of a step of rows ({escaped(share.source)})."


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _memory_table(memory: MemoryPrediction) -> Iterator[str]:
    ways = (("rows", memory.rows), ("trees, whole", memory.whole), ("trees, least", memory.partitioned))
    cells = [(name, one.runs_as, f"{one.tokens:,}", f"{one.memory / GIB:.1f}") for name, one in ways]
    yield format_table(("least memory of a GPU", "runs", "tokens", "GiB"), cells, flush_left=2)
    yield f"Weights, gradients, optimizer state and gathered layers take {memory.state / GIB:.1f} GiB of each."
    yield f"Best max_tokens: {_best(memory)}."


def _best(memory: MemoryPrediction) -> str:
    if memory.max_tokens is None:
        taken = f"{memory.state / GIB:.0f} GiB of {memory.gpu.spec.memory_gib:.0f} are taken before the first token"
        return f"none fits: {taken}; take more GPUs"
    filled = f"{memory.max_tokens:,} fills {MEMORY_FRACTION:.0%} of a GPU"
    return f"{filled}; the largest group runs as: {memory.largest_runs}"


def _notes(memory: MemoryPrediction, update: UpdatePrediction | None) -> Iterator[str]:
    yield "Figures are predictions. One H200 was at most 14 % off, two 9.5 %; more were not measured."
    if memory.gpu is not memory.gpu.H200:
        yield f"Nothing was measured on {memory.gpu.value}: its rate is the H200's share of the peak in its data sheet."
    if update is None:
        return
    yield "Rollouts count as the rest of a step, which trees do not shorten."
    if update.price is not None:
        yield f"Prices are yours: {update.price:g} for a GPU and hour."
