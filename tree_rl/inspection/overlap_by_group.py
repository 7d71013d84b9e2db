"""The overlap of each group of rows and of the whole file."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tree_rl.inspection.row import Row
from tree_rl.tree import Forest, Jagged
from tree_rl.tree.report.branching import BranchCause, classify_branches
from tree_rl.tree.report.overlap import Overlap, combine, measure_forest


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupReport:
    """One group of rows, or all of them."""

    name: str
    """The group's value in the file, or "total"."""
    trees: int
    """Number of trees: one per first token."""
    overlap: Overlap
    """Rows, unique and flat tokens, and the bounds on the speed-up."""
    causes: Counter[BranchCause]
    """Number of branches by cause, most frequent first."""


def rows_by_group(groups: Iterable[str]) -> dict[str, list[int]]:
    """Group -> indices of its rows, in order of first appearance, given the group of each row."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return members


def forest_of(rows: list[Row]) -> Forest:
    """The forest of the rows, which share prefixes only within their group."""
    return Forest.from_rows([row.token_ids for row in rows], merge_key=[row.group for row in rows])


def report_groups(rows: list[Row]) -> list[GroupReport]:
    """Measure each group separately; if any row of a group has no mask, all its tokens count as trained."""
    reports = []
    for name, members in rows_by_group(row.group for row in rows).items():
        chosen = [rows[index] for index in members]
        forest = forest_of(chosen)
        sampled = sampled_tokens(chosen, forest)
        causes = Counter(branch.cause for branch in classify_branches(forest, sampled=sampled))
        report = GroupReport(
            name=name,
            trees=forest.num_trees,
            overlap=measure_forest(forest, trained=sampled),
            causes=Counter(dict(causes.most_common())),
        )
        reports.append(report)
    return reports


def total_of(reports: list[GroupReport]) -> GroupReport:
    """Sums over groups."""
    return GroupReport(
        name="total",
        trees=sum(report.trees for report in reports),
        overlap=combine([report.overlap for report in reports]),
        causes=sum((report.causes for report in reports), start=Counter()),
    )


def sampled_tokens(rows: list[Row], forest: Forest) -> Jagged | None:
    """[B, L_b], tokens that the model sampled; None if any row has no mask."""
    masks = [row.trained for row in rows if row.trained is not None]
    if len(masks) < len(rows):
        return None
    return Jagged(values=np.concatenate(masks), offsets=forest.row_index.offsets)
