"""The page's data for one group of rows; lists are indexed by segments, rows, or runs of unique tokens.

Legend: N unique tokens, S segments, B rows, F row tokens.
"""

import base64
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tree_rl.inspection.overlap_by_group import report_groups, sampled_tokens
from tree_rl.inspection.row import Row
from tree_rl.tree import Forest
from tree_rl.tree.partition import plan_partitions
from tree_rl.tree.report.branching import classify_branches
from tree_rl.viewer.roles import RoleReader
from tree_rl.viewer.tracks import Track, class_track, mean_over_rows, number_track

STEP = re.compile(r"(?:train |val )?step (\d+) · ")
"""Beginning of the name of a group of a training step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A quantity by which the page can colour tokens."""

    key: str
    name: str
    kind: str
    """class: a legend entry per value; number: one hue; change: two hues around 0."""
    about: str
    """Meaning of the colour."""
    missing: str
    """Reason why a file lacks it."""


MEASURES = (
    Measure(
        key="role",
        name="Role",
        kind="class",
        about="who wrote the token. model: trained here; assistant: an earlier answer, not trained; given: unknown",
        missing="",
    ),
    Measure(
        key="reward",
        name="Reward",
        kind="number",
        about="mean reward of the rows through the token",
        missing="no column reward, score or token_level_scores",
    ),
    Measure(
        key="advantage",
        name="Advantage",
        kind="change",
        about="mean advantage of the rows through the token",
        missing="no column advantages",
    ),
    Measure(
        key="log_prob_change",
        name="Log-prob change",
        kind="change",
        about="newer minus older log-probability: log_probs, old_log_probs, rollout_log_probs in this order",
        missing="fewer than two of the columns log_probs, old_log_probs, rollout_log_probs",
    ),
    Measure(
        key="weight_version",
        name="Weight version",
        kind="class",
        about="newest weights that sampled the token",
        missing="no column weight_versions",
    ),
    Measure(
        key="partition",
        name="Partition",
        kind="class",
        about="forward that computes the token",
        missing="name the budget: --max-tokens N",
    ),
    Measure(key="paths", name="Rows through it", kind="number", about="rows that share the token", missing=""),
)


def group_data(rows: list[Row], roles: RoleReader, max_tokens: int | None) -> dict[str, Any]:
    """Tree, tracks, rows, text and curves of one group, ready for JSON; `max_tokens` None plans no partitions."""
    forest = Forest.from_rows([row.token_ids for row in rows])
    report = report_groups(rows)[0]
    overlap, segments = report.overlap, forest.segments
    tracks = _tracks(forest, rows, roles, max_tokens)
    ids = forest.input_ids.astype("<i4").tobytes()
    return {
        "name": report.name,
        "step": None if (found := STEP.match(report.name)) is None else int(found[1]),
        "rows": overlap.paths,
        "trees": report.trees,
        "flat": overlap.flat_tokens,
        "unique": overlap.unique_tokens,
        "por": overlap.por,
        "bound": overlap.token_bound,
        "depth": overlap.depth,
        "causes": {str(cause): count for cause, count in report.causes.most_common()},
        "segments": {
            "parent": segments.parent.tolist(),
            "start": segments.start.tolist(),
            "length": segments.lengths.tolist(),
            "depth": segments.depth.tolist(),
            "paths": segments.path_count.tolist(),
            "cause": _causes(forest, rows),
        },
        "paths": _paths(forest, rows),
        "tracks": {key: track.as_json() for key, track in tracks.items()},
        "active": active_counts(forest),
        "ids": base64.b64encode(ids).decode("ascii"),
        "text": None if roles.tokenizer is None else _texts(forest, tracks["role"], roles.tokenizer.decode),
    }


def active_counts(forest: Forest) -> dict[str, list[int]]:
    """Number of rows and of distinct prefixes at each depth, as step functions (paper, second row of tree figures).

    The area under `rows` is F, that under `distinct` is N, so the ratio of the areas is the token bound.
    """
    segments = forest.segments
    row_end = np.bincount(forest.row_index.lengths, minlength=1)
    size = len(row_end)
    begin = np.bincount(segments.depth, minlength=size) - np.bincount(segments.depth + segments.lengths, minlength=size)
    distinct, rows = np.cumsum(begin), forest.num_rows - np.cumsum(row_end)
    changed = (np.diff(distinct, prepend=-1) != 0) | (np.diff(rows, prepend=-1) != 0)
    at = np.flatnonzero(changed)
    return {"at": at.tolist(), "rows": rows[at].tolist(), "distinct": distinct[at].tolist()}


def _tracks(forest: Forest, rows: list[Row], roles: RoleReader, max_tokens: int | None) -> dict[str, Track]:
    """Track of each measure for which the rows have values."""
    role_N = np.zeros(forest.num_unique, dtype=np.int64)
    for number, row in enumerate(rows):
        index = forest.row_index[number]
        # A token counts as the model's if any row trains it.
        role_N[index] = np.maximum(role_N[index], roles.roles_of(row.token_ids, row.trained))
    tracks = {"role": class_track(forest, role_N)}
    lengths = forest.row_index.lengths
    if any(row.reward is not None for row in rows):
        reward_B = [np.nan if row.reward is None else row.reward for row in rows]
        tracks["reward"] = number_track(forest, mean_over_rows(forest, np.repeat(reward_B, lengths)))
    for key in ("advantage", "log_prob_change"):
        values = [getattr(row, key) for row in rows]
        if any(value is not None for value in values):
            tracks[key] = number_track(forest, mean_over_rows(forest, _flat(values, lengths)))
    versions = [row.weight_version for row in rows]
    if any(value is not None for value in versions):
        newest = np.full(forest.num_unique, -1.0)
        np.fmax.at(newest, forest.row_index.values, _flat(versions, lengths))
        tracks["weight_version"] = class_track(forest, newest.astype(np.int64))
    if max_tokens is not None:
        plan = plan_partitions(forest, max_tokens)
        tracks["partition"] = class_track(forest, plan.partition_of_token.astype(np.int64))
    tracks["paths"] = number_track(forest, forest.path_count.astype(np.float64))
    return tracks


def _flat(values: list[np.ndarray | None], lengths: np.ndarray) -> np.ndarray:
    """float64 [F], NaN for rows without values."""
    pairs = zip(values, lengths.tolist(), strict=True)
    return np.concatenate([np.full(length, np.nan) if value is None else value for value, length in pairs])


def _causes(forest: Forest, rows: list[Row]) -> list[str | None]:
    """[S], why each segment branched off from its heaviest sibling; None for that sibling and for roots."""
    sampled = sampled_tokens(rows, forest)
    causes: list[str | None] = [None] * forest.num_segments
    for branch in classify_branches(forest, sampled=sampled):
        if branch.child is not None:
            causes[branch.child] = str(branch.cause)
    return causes


def _paths(forest: Forest, rows: list[Row]) -> dict[str, list[Any]]:
    """[B] each: name, last segment, length and reward of the rows."""
    last = forest.row_index.values[forest.row_index.offsets[1:] - 1]
    end = np.searchsorted(forest.segments.start, last, side="right") - 1
    return {
        "name": [row.name for row in rows],
        "end": end.tolist(),
        "tokens": forest.row_index.lengths.tolist(),
        "reward": [None if row.reward is None or not np.isfinite(row.reward) else round(row.reward, 6) for row in rows],
    }


def _texts(forest: Forest, roles: Track, decode: Callable[[list[int]], str]) -> list[str]:
    """Text of each run of the role track; a character whose bytes are in two runs becomes a replacement character."""
    ends = np.append(roles.start[1:], forest.num_unique).tolist()
    bounds = zip(roles.start.tolist(), ends, strict=True)
    return [decode(forest.input_ids[start:end].tolist()) for start, end in bounds]
