"""The advantages of estimators that know the tree (`tree_rl.credit`), and the paths of longest_path."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from verl.protocol import DataProto

from tree_rl.credit import CreditRow, CreditTree, Estimator, Leaf, whiten
from tree_rl.credit.credit_tree import CONTEXT
from tree_rl.verl_plugin.extra_fields import CREDIT
from tree_rl.verl_plugin.path_weights import PromptTree
from tree_rl.verl_plugin.trainer.sessions import Sessions

REPORTED = tuple(one.name for one in fields(Leaf) if one.name != "reward")
"""What a session may report to estimators."""


def longest_paths(sessions: Sessions, row_lengths: Sequence[int]) -> list[int]:
    """Each session's longest row, in row order; among equally long rows the last.

    `row_lengths` has the number of prompt and response tokens of B rows.
    """
    lengths = np.asarray(row_lengths)
    return sorted(int(rows[::-1][np.argmax(lengths[rows[::-1]])]) for rows in sessions.rows_of_session)


def credit_trees(
    data: DataProto,
    sessions: Sessions,
    outcome_S: torch.Tensor,
    nested_mask: torch.Tensor,
    *,
    row_tokens: Sequence[np.ndarray],
    extras: Sequence[Mapping[str, Any]],
) -> list[PromptTree]:
    """The tree of each prompt; its leaves are sessions.

    Args:
        data: B rows: uid.
        outcome_S: outcome of each session.
        nested_mask: [B, response tokens], nonzero where a token was generated and trains.
        row_tokens: B arrays of token ids, prompt and response.
        extras: verl's `extra_fields` of B rows. `response_calls` numbers the calls; without it a run of generated
            tokens is a call. `credit` of a session's final row has entries of `Leaf`.

    Raises:
        ValueError: a session reports something else; names its prompt and row.
    """
    uids = data.non_tensor_batch["uid"].tolist()
    masks = [mask.cpu().numpy() for mask in nested_mask.unbind()]
    steps: list[np.ndarray] = [np.empty(0)] * len(uids)
    for members in sessions.rows_of_session:
        runs: dict[bytes, int] = {}
        for row in members.tolist():
            trained, calls = masks[row] != 0, extras[row].get("response_calls")
            tokens = row_tokens[row]
            given = _runs(trained, tokens, runs) if calls is None else np.asarray(calls)
            if given.shape != trained.shape or given.dtype.kind not in "iu":
                raise ValueError(
                    f"prompt {uids[row]}, row {row}: response_calls: expected a whole number for each of "
                    f"{len(trained)} response tokens, received {given.dtype} {given.shape}"
                )
            context = np.full(len(tokens) - len(trained), CONTEXT)
            steps[row] = np.concatenate([context, np.where(trained, given, CONTEXT)])
    trees = []
    for uid in dict.fromkeys(uids):
        # By session and branch: the layout of the batch decides nothing.
        rows = [row for members in sessions.rows_of_session for row in members.tolist() if uids[row] == uid]
        members, leaf_of_row = np.unique(sessions.session_of_row[rows], return_inverse=True)
        leaves: list[Leaf] = []
        for session in members.tolist():
            last = int(sessions.rows_of_session[session][-1])
            report = extras[last].get(CREDIT) or {}
            where = f"prompt {uid}, session {len(leaves)}, row {last}"
            if not isinstance(report, Mapping):
                raise ValueError(f"{where}: credit {report!r}: expected entries {', '.join(REPORTED)}")
            unknown = sorted(map(str, set(report) - set(REPORTED)))
            if unknown:
                raise ValueError(f"{where}: a session reports {unknown[0]!r}; known are {', '.join(REPORTED)}")
            try:
                leaves.append(Leaf(reward=float(outcome_S[session]), **report))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
        pairs = zip(rows, leaf_of_row.tolist(), strict=True)
        made = [CreditRow(tokens=row_tokens[row], leaf=leaf, steps=steps[row]) for row, leaf in pairs]
        trees.append((rows, CreditTree.of(made, leaves, name=f"prompt {uid}")))
    return trees


def _runs(trained: np.ndarray, tokens: np.ndarray, number_of_run: dict[bytes, int]) -> np.ndarray:
    """Number each run of trained tokens; rows of a session that begin alike share their runs."""
    begins_T = np.diff(trained.astype(np.int8), prepend=0) == 1
    run_T = np.cumsum(begins_T) - 1
    prompt = len(tokens) - len(trained)
    keys = [tokens[: prompt + start + 1].tobytes() for start in np.flatnonzero(begins_T).tolist()]
    numbers = np.array([number_of_run.setdefault(key, len(number_of_run)) for key in keys] or [CONTEXT])
    return numbers[run_T]


def tree_advantages(
    data: DataProto,
    trees: Sequence[PromptTree],
    estimator: Estimator,
    options: Mapping[str, Any],
    *,
    response_lengths: np.ndarray,
    token_weights: Callable[[], torch.Tensor],
) -> DataProto:
    """Write `advantages` and `returns`, [B, T], of padded rows with token_level_scores and response_mask.

    Each row ends with its number of response tokens, int [B]; only whitening calls for `trained_token_weights`. Raises
    a ValueError if the estimator returns something else than a finite number for each flat token.
    """
    mask_BT = data.batch["response_mask"]
    advantages = np.zeros(tuple(mask_BT.shape))
    for rows, tree in trees:
        credit_F = np.asarray(estimator.credit(tree, **options), dtype=np.float64)
        if credit_F.shape != tree.node_F.shape or not np.isfinite(credit_F).all():
            name = getattr(estimator.credit, "__name__", repr(estimator.credit))
            raise ValueError(
                f"{tree.name}: expected a finite advantage for each of {len(tree.node_F)} tokens, received "
                f"{credit_F.shape} from {name}"
            )
        for row, credit in zip(rows, tree.forest.row_index.with_values(credit_F), strict=True):
            advantages[row, : response_lengths[row]] = credit[len(credit) - response_lengths[row] :]
    if estimator.whitens:
        advantages = whiten(advantages, token_weights().double().cpu().numpy())
    advantages_BT = torch.from_numpy(advantages).to(data.batch["token_level_scores"]) * mask_BT
    data.batch["advantages"], data.batch["returns"] = advantages_BT, advantages_BT
    return data
