"""The groups of a file as the page reads them: segments, rows and figures, in plain lists.

Legend: B rows, S segments, N unique tokens of a group.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tree_rl.inspection.report import forest_of, rows_by_group
from tree_rl.inspection.row import Row
from tree_rl.tree import Forest, Jagged
from tree_rl.tree.partition import plan_partitions
from tree_rl.tree.report.branching import classify_branches, count_causes
from tree_rl.viewer.row_figures import FIGURES, Figures

Decode = Callable[[Sequence[int]], str]


def describe_groups(
    rows: Sequence[Row], figures: Sequence[Figures], *, decode: Decode | None, max_tokens: int | None
) -> list[dict[str, Any]]:
    """All groups, most overlap first.

    Args:
        rows: of the file.
        figures: of each row.
        decode: text of token ids; None shows the ids.
        max_tokens: budget of a partition; None cuts nothing.
    """
    groups = []
    for name, members in rows_by_group(row.group for row in rows).items():
        chosen = [rows[index] for index in members]
        groups.append(_describe(name, chosen, [figures[index] for index in members], decode, max_tokens))
    return sorted(groups, key=lambda group: (-group["por"], group["name"]))


def _describe(
    name: str, rows: list[Row], figures: list[Figures], decode: Decode | None, max_tokens: int | None
) -> dict[str, Any]:
    forest = forest_of(rows)
    segments = forest.segments
    sampled = _sampled(rows, forest)
    branches = classify_branches(forest, sampled=sampled)
    causes = [""] * len(segments)
    for branch in branches:
        if branch.child is not None:
            causes[branch.child] = str(branch.cause)
    segment_of_token = np.repeat(np.arange(len(segments)), segments.lengths)
    last = [int(forest.row_index[row][-1]) for row in range(len(rows))]
    spans = list(zip(segments.start.tolist(), segments.end.tolist(), strict=True))
    shared = None if sampled is None else forest.rows_that_mark(sampled) > 0
    return {
        "name": name,
        "por": forest.por,
        "unique": forest.num_unique,
        "flat": forest.num_flat,
        "causes": {str(cause): count for cause, count in count_causes(branches).items() if count},
        "segments": {
            "parent": segments.parent.tolist(),
            "depth": segments.depth.tolist(),
            "length": segments.lengths.tolist(),
            "paths": segments.path_count.tolist(),
            "cause": causes,
            "roles": None if shared is None else [_runs(shared[start:end]) for start, end in spans],
            "partition": _partitions(forest, max_tokens),
            "text": [_text(forest.input_ids[start:end], decode) for start, end in spans],
        },
        "rows": {
            "name": [row.name for row in rows],
            "tokens": [len(row.token_ids) for row in rows],
            "leaf": segment_of_token[last].tolist(),
            "figures": {
                figure: [one.get(figure) for one in figures]
                for figure in FIGURES
                if any(figure in one for one in figures)
            },
        },
    }


def _sampled(rows: list[Row], forest: Forest) -> Jagged | None:
    masks = [row.trained for row in rows if row.trained is not None]
    if len(masks) < len(rows):
        return None
    return Jagged(values=np.concatenate(masks), offsets=forest.row_index.offsets)


def _runs(sampled: np.ndarray) -> list[int]:
    """Lengths of the runs of given and sampled tokens in turn, given first; the first may be 0."""
    turns = np.flatnonzero(np.diff(sampled.astype(np.int8))) + 1
    runs = np.diff([0, *turns.tolist(), len(sampled)]).tolist()
    return [0, *runs] if sampled[0] else runs


def _partitions(forest: Forest, max_tokens: int | None) -> list[int] | None:
    """Partition of each segment's first token."""
    if max_tokens is None:
        return None
    if forest.num_unique <= max_tokens:
        return [0] * forest.num_segments
    part_of_token = plan_partitions(forest, max_tokens).partition_of_token
    return [int(number) for number in part_of_token[forest.segments.start]]


def _text(ids: np.ndarray, decode: Decode | None) -> str:
    return " ".join(map(str, ids.tolist())) if decode is None else decode(ids.tolist())
