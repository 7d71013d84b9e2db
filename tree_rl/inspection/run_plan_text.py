"""A run plan as plain text: forwards in total, then how each group runs."""

from collections.abc import Sequence

from tree_rl.inspection.run_plan import GroupRun, RunPlan
from tree_rl.inspection.text import format_table
from tree_rl.tree.attention_blocks import BLOCK

TOTALS = ("", "groups", "forwards", "tokens", "utilisation", "largest")
GROUPS = ("group", "rows", "unique", "runs", "partitions", "utilisation", "relayed", "depth", "peak live", "solver")


def format_run_plan(plan: RunPlan, *, at_most: int) -> str:
    """The totals beside those of rows without sharing, and the groups, those in partitions first.

    Args:
        plan: the plan.
        at_most: groups to list; the others are counted.

    Returns:
        Several lines.
    """
    whole = [batch.unique_tokens for batch in plan.whole.micro_batches]
    parts = [partition.num_tokens for group in plan.partitioned for partition in group.partitions]
    flat = [batch.unique_tokens for batch in plan.flat.micro_batches]
    long = [len(row.token_ids) for row in plan.oversized_rows]
    num_groups, num_cut = len(plan.groups), len(plan.partitioned)
    totals = [
        _total("tree", num_groups, whole + parts, plan.max_tokens),
        _total("  whole groups", num_groups - num_cut, whole, plan.max_tokens),
        _total("  in partitions", num_cut, parts, plan.max_tokens),
        _total("rows", num_groups, flat + long, plan.max_tokens),
    ]
    ordered = sorted(plan.groups, key=lambda group: group.partitions is None)
    lines = [format_table(TOTALS, totals)]
    if at_most:
        lines += ["", format_table(GROUPS, [_cells(group) for group in ordered[:at_most]])]
    if num_groups > at_most:
        lines.append(f"({num_groups - at_most} more groups; list them with --groups {num_groups})")
    blocks = plan.attention
    lines.append(
        f"\nAttention visits {blocks.full + blocks.partial:,} blocks of {BLOCK} x {BLOCK} tokens: "
        f"{blocks.full:,} full, {blocks.partial:,} partial ({blocks.partial_share:.0%})."
    )
    if long:
        lines.append(
            f"\n{len(long)} rows alone exceed {plan.max_tokens:,} tokens ({plan.oversized_rows[0].name}, ...): without "
            "trees they run over the budget."
        )
    return "\n".join(lines)


def _total(name: str, num_groups: int, sizes: Sequence[int], max_tokens: int) -> tuple[str, ...]:
    used = f"{sum(sizes) / (len(sizes) * max_tokens):.1%}" if sizes else "-"
    return (name, f"{num_groups:,}", f"{len(sizes):,}", f"{sum(sizes):,}", used, f"{max(sizes, default=0):,}")


def _cells(group: GroupRun) -> tuple[str, ...]:
    cells = (group.name[:32], f"{group.num_rows:,}", f"{group.unique_tokens:,}")
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
