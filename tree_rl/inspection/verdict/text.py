"""Verdicts and predictions as plain text."""

from collections.abc import Iterator

from tree_rl.cost.memory.budget import MEMORY_FRACTION
from tree_rl.cost.memory.model import GIB
from tree_rl.inspection.files.quoting import escaped
from tree_rl.inspection.overlap_by_group import GroupReport
from tree_rl.inspection.text import format_table
from tree_rl.inspection.verdict.judgement import WORTHWHILE, Verdict
from tree_rl.inspection.verdict.prediction import MemoryPrediction, UpdatePrediction, WholeStep
from tree_rl.tree.report.counted import counted

NAME_LENGTH = 40


def format_verdict(verdict: Verdict, merged: GroupReport, assumed: str) -> str:
    """The closing lines of `tree-rl inspect`; `assumed` names the model of the FLOP bound."""
    taken = "\n              ".join(escaped(str(taken)) for taken in verdict.recording.taken)
    share, reached, bench, engine = verdict.share, verdict.reached, verdict.reached.bench, verdict.reached.engine
    steps = ", ".join(f"{share.step_speed_up(verdict.update[0], one):.2f}x" for one in share.shares)
    if len(share.shares) == 1:
        steps = f"{_range(verdict.step)} times"
    by_tokens = f"POR {merged.overlap.por:.3f}: {verdict.token_bound:.2f}x by tokens"
    lines = [
        f"Verdict: {_says(verdict)}. Expected: updates {_range(verdict.update)} times as fast, whole steps "
        f"{_range(verdict.step)} times.",
        f"  taken       {taken}",
        *_prefix_rows(verdict, merged),
        f"  bounds      {by_tokens}, {verdict.flop_bound:.2f}x by operations ({assumed})",
        f"  update      {_range(verdict.update)} times: the bound by operations, less what trees do not shorten",
        f"  measured    {reached.kind}, on one H200: {engine[0]:.2f} to {engine[1]:.2f} of a bound of "
        f"{max(reached.engine_bound):.1f} through verl's engine, {bench[0]:.2f} to {bench[1]:.2f} by bench",
        f"  whole step  {steps} if updates take {share} of a step ({escaped(share.source)})",
    ]
    if verdict.equal_rows:
        equal = f"{verdict.equal_rows:,} of {verdict.rows:,} rows repeat another row of their group"
        lines.append(f"  equal rows  {equal}: duplicates count in the bounds; drop those that were not sampled twice")
    if verdict.memory is None:
        lines.append("  memory      --model CONFIG predicts it, with the best max_tokens")
    lines.append(f"  next        {escaped(verdict.next_command)}")
    return "\n".join(lines)


def _says(verdict: Verdict) -> str:
    if not verdict.trains:
        says = "no token trains: no turn of an assistant, or masks of zeros"
    elif not verdict.helps:
        says = "trees would save little"
    elif verdict.step[0] >= WORTHWHILE:
        says = "trees help"
    elif verdict.needed_share > 1:
        says = "trees may help"
    else:
        says = f"trees help if updates take at least {verdict.needed_share:.0%} of a step"
    return says + ("" if verdict.recording.has_groups else ", if these are the groups")


def _range(figures: tuple[float, float]) -> str:
    least, most = (f"{figure:.2f}" for figure in figures)
    return least if least == most else f"{least} to {most}"


def _prefix_rows(verdict: Verdict, merged: GroupReport) -> Iterator[str]:
    if verdict.prefix_rows:
        many = f"{verdict.prefix_rows:,} of {verdict.rows:,} rows are plain prefixes of another row of their group"
        yield f"  prefixes    {many}:"
        yield "              an appending trainer stores them as one row, as verl's tool loop and our gateway do."
        yield f"              All lines below count the {counted(merged.overlap.paths, 'merged row')}"


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
    times = [("rows", update.rows), ("trees", update.trees)]
    cells = [[name, f"{time.total:,.2f}"] for name, time in times]
    yield format_table(("", "update s"), [*cells, ["trees are faster", f"{update.speed_up:.2f}x"]])
    yield ""
    header = ["updates in a step", "rows s", "trees s", "faster"]
    header += [] if update.price is None else ["rows cost", "trees cost", "saved in 100 steps"]
    yield format_table(header, [_step_cells(step)[: len(header)] for step in update.steps])
    yield f"Updates' share of a step of rows: {escaped(update.share.source)}."


def _step_cells(step: WholeStep) -> list[str]:
    (flat, tree), (flat_price, tree_price) = step.seconds, step.price
    saved = None if flat_price is None or tree_price is None else 100 * (flat_price - tree_price)
    times = [f"{step.share:.0%}", _figure(flat), _figure(tree), f"{step.speed_up:.2f}x"]
    return [*times, _figure(flat_price), _figure(tree_price), _figure(saved)]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _memory_table(memory: MemoryPrediction) -> Iterator[str]:
    ways = (("rows", memory.rows), ("trees, whole", memory.trees_whole), ("trees, least", memory.trees_least))
    cells = [(name, one.runs_as, f"{one.tokens:,}", f"{one.gpu_bytes / GIB:.1f}") for name, one in ways]
    yield format_table(("least memory of a GPU", "runs", "tokens", "GiB"), cells, flush_left=2)
    yield f"Weights, gradients, optimizer state and gathered layers take {memory.state_bytes / GIB:.1f} GiB of each."
    yield f"Best max_tokens: {_best(memory)}."


def _best(memory: MemoryPrediction) -> str:
    if memory.max_tokens is None:
        taken = f"{memory.state_bytes / GIB:.0f} GiB of {memory.gpu.spec.memory_gib:.0f} are taken"
        return f"none fits: {taken} before the first token; take more GPUs"
    filled = f"{memory.max_tokens:,} fills {MEMORY_FRACTION:.0%} of a GPU"
    return f"{filled}; the largest group runs as: {memory.largest_runs_as}"


def _notes(memory: MemoryPrediction, update: UpdatePrediction | None) -> Iterator[str]:
    yield "Figures are predictions. One H200 was at most 12.4 % off, two 7.9 %; more were not measured."
    if memory.gpu is not memory.gpu.H200:
        yield f"Nothing was measured on {memory.gpu.value}: its rate is the H200's share of the peak in its data sheet."
    if update is None:
        return
    yield "Rollouts count as the rest of a step, which trees do not shorten."
    if update.price is not None:
        yield f"Prices are yours: {update.price:g} for a GPU and hour."
