"""Reports as plain text tables."""

from collections.abc import Sequence

from tree_rl.inspection.report import GroupReport
from tree_rl.tree.cost import ModelShape

COLUMNS = ("group", "rows", "trees", "unique", "flat", "POR", "token bound", "FLOP bound", "branches", "depth")


def format_report(reports: list[GroupReport], total: GroupReport, shape: ModelShape, *, at_most: int) -> str:
    """The table of groups, the total, and the causes of branching.

    Args:
        reports: one per group.
        total: their sum.
        shape: model of the FLOP bound.
        at_most: groups to list; the others are counted.

    Returns:
        Several lines.
    """
    lines = [_cells(report, shape) for report in reports[:at_most]]
    if len(reports) > 1:
        lines.append(_cells(total, shape))
    table = format_table(COLUMNS, lines)
    if len(reports) > at_most:
        table += f"\n({len(reports) - at_most} more groups in the total; list them with --groups {len(reports)})"
    return table + "\n\n" + format_causes(total)


def format_causes(report: GroupReport) -> str:
    """Branches by what made them, most frequent first."""
    if not report.causes:
        return "No branches: no two rows of a group part behind a common prefix."
    lines = [(str(cause), f"{count:,}") for cause, count in report.causes.most_common()]
    return format_table(("branches because of", "count"), lines)


def format_table(header: Sequence[str], lines: Sequence[Sequence[str]], *, flush_left: int = 1) -> str:
    """Columns of equal width, the first ones flush left, the others flush right."""
    widths = [max(len(line[column]) for line in [header, *lines]) for column in range(len(header))]

    def join(line: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if column < flush_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([join(header), "  ".join("-" * width for width in widths), *map(join, lines)])


def _cells(report: GroupReport, shape: ModelShape) -> tuple[str, ...]:
    overlap = report.overlap
    return (
        report.name[:32],
        f"{overlap.paths:,}",
        f"{report.trees:,}",
        f"{overlap.unique_tokens:,}",
        f"{overlap.flat_tokens:,}",
        f"{overlap.por:.3f}",
        f"{overlap.token_bound:.2f}x",
        f"{overlap.flop_bound(shape):.2f}x",
        f"{sum(report.causes.values()):,}",
        f"{overlap.depth:,}",
    )
