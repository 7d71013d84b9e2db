"""What a reader of the table wants to know: how far from the ceilings, and whether a tree is slower than its rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from tree_rl.inspection.text import format_table

HEADER = ("shape", "heads", "tokens", "contender", "ms fwd", "ms f+b", "range", "TF fwd", "TF f+b", "speed-up", "ideal")

Columns = Mapping[str, Any]


def summarise(rows: Sequence[Columns]) -> str:
    """One line per contender that ran; speed-ups are over the fastest run of the rows alone.

    Args:
        rows: of the CSV.
    """
    cases: dict[tuple[Any, ...], list[Columns]] = {}
    lines = []
    for row in rows:
        if "total_ms" in row:
            cases.setdefault((row["shape"], row["heads"], row["unique_tokens"]), []).append(row)
        elif "forward_tflops" in row:
            lines.append(
                (row["contender"], "", "", "", f"{row['forward_ms']:.2f}", "", "", _rate(row, "forward"), *[""] * 3)
            )
    for (shape, heads, tokens), members in cases.items():
        paths = min((row["total_ms"] for row in members if row["contender"].startswith("paths")), default=None)
        for row in members:
            is_tree = row["contender"].startswith("tree")
            lines.append(
                (
                    shape,
                    heads,
                    f"{tokens:,}",
                    row["contender"] + (" (sample)" if row["sample_scaled_by"] != 1 else ""),
                    f"{row['forward_ms']:.2f}",
                    f"{row['total_ms']:.2f}",
                    f"{row['total_ms_low']:.2f} to {row['total_ms_high']:.2f}",
                    _rate(row, "forward"),
                    _rate(row, "total"),
                    f"{paths / row['total_ms']:.2f}" if is_tree and paths is not None else "",
                    f"{row['flat_pairs'] / row['unique_pairs']:.2f}" if is_tree else "",
                )
            )
    return format_table(HEADER, lines)


def _rate(row: Columns, name: str) -> str:
    return f"{row[f'{name}_tflops']:.3g}"
