"""Overlap of groups and run plans as plain text tables."""

from collections.abc import Sequence
from importlib.util import find_spec

from rich.cells import cell_len

from tree_rl.cost.cost_model import ModelShape
from tree_rl.cost.memory.model import GIB
from tree_rl.extras import install_command
from tree_rl.inspection.files.quoting import escaped
from tree_rl.inspection.overlap_by_group import GroupReport
from tree_rl.inspection.run_plan import GroupRun, RunPlan
from tree_rl.tree.attention_blocks import BLOCK
from tree_rl.tree.report.counted import counted

OVERLAP = ("group", "rows", "trees", "unique", "flat", "POR", "token bound", "FLOP bound", "branches", "depth")
TOTALS = ("", "groups", "forwards", "tokens", "utilisation", "largest")
RUNS = ("group", "rows", "unique", "runs", "partitions", "utilisation", "relayed", "depth", "peak live", "solver")
CHOICES = ("beyond the budget", "GPU GiB", "host GiB", "runs as")
CHOICES_SAY = "Predicted peaks, beside weights, gradients and optimizer."

NAME_LENGTH = 32


def format_report(
    reports: list[GroupReport], total: GroupReport, merged: GroupReport, shape: ModelShape, *, at_most: int
) -> str:
    """Table of at most `at_most` groups, the total, the total of merged rows, and the causes of branching.

    `shape` sets the FLOP bound. A total that equals the line above it is left out.
    """
    lines = [_overlap_cells(report, shape) for report in reports[:at_most]]
    if len(reports) > 1 or not at_most:
        lines.append(_overlap_cells(total, shape))
    if merged.overlap.paths < total.overlap.paths:
        lines.append(_overlap_cells(merged, shape))
    table = format_table(OVERLAP, lines)
    if len(reports) > at_most:
        more = counted(len(reports) - at_most, "more group")
        table += f"\n({more} in the total; list them with --groups {len(reports)})"
    if not total.causes:
        return table + "\n\nNo branches: no two rows of a group share a prefix and then differ."
    causes = [(str(cause), f"{count:,}") for cause, count in total.causes.most_common()]
    return table + "\n\n" + format_table(("branches because of", "count"), causes)


def format_run_plan(plan: RunPlan, *, at_most: int) -> str:
    """Totals with and without sharing, and at most `at_most` groups, those in partitions first."""
    whole, flat = list(plan.whole), list(plan.flat)
    parts = [partition.num_tokens for group in plan.partitioned for partition in group.partitions]
    long = [len(row.token_ids) for row in plan.oversized_rows]
    beyond = [group.unique_tokens for group in plan.beyond]
    num_groups, num_cut = len(plan.groups), len(plan.partitioned)
    totals = [
        _total("tree", num_groups, whole + beyond + parts, plan.max_tokens),
        _total("  whole groups", num_groups - num_cut, whole + beyond, plan.max_tokens),
        _total("  in partitions", num_cut, parts, plan.max_tokens),
        _total("rows", num_groups, flat + long, plan.max_tokens),
    ]
    ordered = sorted(plan.groups, key=lambda group: group.partitions is None)
    lines = [format_table(TOTALS, totals)]
    if at_most:
        lines += ["", format_table(RUNS, [_run_cells(group) for group in ordered[:at_most]])]
        named = [(escaped(group.name, NAME_LENGTH), group.choice) for group in ordered[:at_most] if group.choice]
        chosen = [
            (name, f"{choice.peak.device / GIB:.1f}", f"{choice.peak.host / GIB:.1f}", choice.name)
            for name, choice in named
        ]
        lines += ["", format_table(CHOICES, chosen), CHOICES_SAY] if chosen else []
    if not all(group.is_optimal for group in plan.partitioned) and find_spec("ortools") is None:
        install = install_command("ortools")
        lines += ["", f"OR-Tools is not installed. Training has it: a plan not proven may be better there; {install}"]
    if num_groups > at_most:
        lines.append(f"({counted(num_groups - at_most, 'more group')}; list them with --groups {num_groups})")
    blocks = plan.attention
    lines.append(
        f"\nAttention visits {counted(blocks.full + blocks.partial, 'block')} of {BLOCK} x {BLOCK} tokens: "
        f"{blocks.full:,} full, {blocks.partial:,} partial ({blocks.partial_share:.0%})."
    )
    if long:
        lines.append(
            f"\nOver the budget without trees: {counted(len(long), 'row')} of more than {plan.max_tokens:,} tokens "
            f"({plan.oversized_rows[0].name}{', ...' if len(long) > 1 else ''})."
        )
    return "\n".join(lines)


def format_table(header: Sequence[str], lines: Sequence[Sequence[str]], *, flush_left: int = 1) -> str:
    """A table of aligned columns, the first `flush_left` of them flush left, the others flush right."""
    widths = [max(cell_len(line[column]) for line in [header, *lines]) for column in range(len(header))]

    def join(line: Sequence[str]) -> str:
        cells = []
        for column, (cell, width) in enumerate(zip(line, widths, strict=True)):
            space = " " * (width - cell_len(cell))
            cells.append(cell + space if column < flush_left else space + cell)
        return "  ".join(cells).rstrip()

    return "\n".join([join(header), "  ".join("-" * width for width in widths), *map(join, lines)])


def _overlap_cells(report: GroupReport, shape: ModelShape) -> tuple[str, ...]:
    overlap = report.overlap
    return (
        escaped(report.name, NAME_LENGTH),
        f"{overlap.paths:,}",
        f"{report.trees:,}",
        f"{overlap.unique_tokens:,}",
        f"{overlap.flat_tokens:,}",
        f"{overlap.por:.3f}",
        f"{overlap.token_bound:.2f}x",
        f"{shape.flop_bound(overlap):.2f}x",
        f"{sum(report.causes.values()):,}",
        f"{overlap.depth:,}",
    )


def _total(name: str, num_groups: int, sizes: Sequence[int], max_tokens: int) -> tuple[str, ...]:
    used = f"{sum(sizes) / (len(sizes) * max_tokens):.1%}" if sizes else "-"
    return (name, f"{num_groups:,}", f"{len(sizes):,}", f"{sum(sizes):,}", used, f"{max(sizes, default=0):,}")


def _run_cells(group: GroupRun) -> tuple[str, ...]:
    cells = (escaped(group.name, NAME_LENGTH), f"{group.num_rows:,}", f"{group.unique_tokens:,}")
    plan = group.partitions
    if plan is None:
        return (*cells, "whole", *["-"] * 6)
    found = f"{plan.num_partitions:,}" if plan.is_optimal else f"{plan.num_partitions:,} (>= {plan.lower_bound:,})"
    return (
        *cells,
        "partitioned",
        found,
        f"{plan.utilisation:.1%}",
        f"{plan.relayed_tokens:,}",
        f"{plan.depth:,}",
        f"{plan.peak_live_tokens:,}",
        f"{plan.solver.replace('_', ' ')}, {'optimal' if plan.is_optimal else 'not proven'}",
    )
