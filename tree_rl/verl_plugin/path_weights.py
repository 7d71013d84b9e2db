"""Weights of `tree.path_weighting`, computed over whole groups before their rows are distributed to ranks.

A rank may have only part of a group, so engines cannot count K or g_t. Legend: B rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from tree_rl.credit import CreditTree
from tree_rl.credit.named import imported
from tree_rl.tree.forest import Forest
from tree_rl.tree.weights import once_per_token_weights, session_weights, tree_mean_weights
from tree_rl.verl_plugin.options import ENGINES, PATH_WEIGHT_COLUMNS

ENGINE_CONFIGS = ENGINES[0], ENGINES[2]
"""Keys of the options of engines that train."""

PromptTree = tuple[list[int], CreditTree]
"""Rows of a prompt in the batch, and their tree."""


def wanted_weightings(config: DictConfig) -> list[str]:
    """The values of `tree.path_weighting` of the engines that train, if they need a column."""
    nodes = [OmegaConf.select(config, f"{path}.tree.path_weighting") for path in ENGINE_CONFIGS]
    return sorted({str(value) for value in nodes} & PATH_WEIGHT_COLUMNS.keys())


def custom_weights_name(config: DictConfig) -> str | None:
    """`tree.custom_weights` of the engines with `path_weighting: custom`, which must agree; None without any."""
    trees = [OmegaConf.select(config, f"{path}.tree") or {} for path in ENGINE_CONFIGS]
    names = {str(tree.get("custom_weights", "row_weight")) for tree in trees if tree.get("path_weighting") == "custom"}
    if len(names) > 1:
        raise ValueError(f"tree.custom_weights: actor and critic name {sorted(names)}; name one")
    return names.pop() if names else None


def path_weight_columns(
    weightings: Sequence[str],
    group_of_row: np.ndarray,
    row_tokens: Sequence[np.ndarray],
    trained: Sequence[np.ndarray],
    *,
    session_of_row: np.ndarray | None = None,
    custom: Sequence[np.ndarray] | None = None,
) -> dict[str, torch.Tensor]:
    """Nested float64 columns, one entry per response token: by name 1 / K of the row's tree, 1 / g_t where trained,
    1 / (rows of the session), and the weights of `custom_weights`.

    Args:
        weightings: `sep_avg`, `token_unique`, `session`, `custom`.
        group_of_row: int [B], the prompt of each row; prompts have separate trees.
        row_tokens: B arrays of token ids, prompt and response.
        trained: B arrays, nonzero where the loss counts a token; aligned with the row's end.
        session_of_row: int [B], for `session`.
        custom: B arrays, for `custom`.
    """
    lengths = [len(mask) for mask in trained]
    by_name: dict[str, list[np.ndarray]] = {name: [np.empty(0)] * len(trained) for name in weightings}
    if "session" in weightings:
        assert session_of_row is not None
        pairs = zip(session_weights(session_of_row), lengths, strict=True)
        by_name["session"] = [np.full(length, weight) for weight, length in pairs]
    if "custom" in weightings:
        assert custom is not None
        by_name["custom"] = list(custom)
    for group in np.unique(group_of_row).tolist() if {"sep_avg", "token_unique"} & by_name.keys() else []:
        rows = np.flatnonzero(group_of_row == group).tolist()
        forest = Forest.from_rows([row_tokens[row] for row in rows])
        mean_B = tree_mean_weights(forest)
        for local, weight in enumerate(weights_within(forest, [trained[row] for row in rows])):
            for name, value in (("sep_avg", np.full(len(weight), mean_B[local])), ("token_unique", weight)):
                if name in by_name:
                    by_name[name][rows[local]] = value
    return {
        PATH_WEIGHT_COLUMNS[name]: torch.nested.as_nested_tensor(
            [torch.from_numpy(entry) for entry in entries], layout=torch.jagged
        )
        for name, entries in by_name.items()
    }


def custom_weights(
    name: str, lengths: Sequence[int], extras: Sequence[Mapping[str, Any]], trees: Sequence[PromptTree]
) -> list[np.ndarray]:
    """The weights that `custom_weights` names: B float64 arrays, one entry per response token.

    Args:
        name: entry of `extra_fields` or of its `reward_extra_info`, or the dotted name of a function of a tree.
        lengths: response tokens of B rows.
        extras: verl's `extra_fields` of B rows.
        trees: all rows; read by a function alone.

    Raises:
        ValueError: a row has no such entry, or the weights do not fit the row.
    """
    given: list[Any] = [extra.get(name, (extra.get("reward_extra_info") or {}).get(name)) for extra in extras]
    if "." in name:
        function = imported(name)
        for rows, tree in trees:
            found = np.asarray(function(tree), dtype=np.float64)
            by_token = found.shape == tree.node_F.shape
            if not by_token and found.shape != (len(rows),):
                raise ValueError(
                    f"{tree.name}: tree.custom_weights={name} returned {found.shape}; expected a number for each of "
                    f"{len(rows)} rows or {len(tree.node_F)} tokens"
                )
            for row, one in zip(rows, tree.forest.row_index.with_values(found) if by_token else found, strict=True):
                given[row] = one[len(one) - lengths[row] :] if np.ndim(one) else one
    weights = []
    for row, (one, length) in enumerate(zip(given, lengths, strict=True)):
        try:
            weight = np.asarray(np.nan if one is None else one, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {row}: tree.custom_weights={name}: {error}; expected numbers") from error
        if one is None or weight.shape not in ((), (length,)):
            raise ValueError(
                f"row {row}: tree.custom_weights={name}: expected a number, or one for each of {length} response "
                f"tokens, received {'none' if one is None else weight.shape}"
            )
        wrong = weight[~(np.isfinite(weight) & (weight >= 0))]
        if wrong.size:
            raise ValueError(
                f"row {row}: tree.custom_weights={name}: expected finite numbers of at least 0, received {wrong[0]}"
            )
        weights.append(np.broadcast_to(weight, length).copy())
    return weights


def weights_within(forest: Forest, trained: Sequence[np.ndarray]) -> list[np.ndarray]:
    """1 / (rows that train the token) where trained, else 0: one float64 array per row, as long as its mask.

    `trained` has a mask per row, nonzero where its token is trained and aligned with the row's end.
    """
    marks = [
        np.pad(mask != 0, (size - len(mask), 0)) for mask, size in zip(trained, forest.row_index.lengths, strict=True)
    ]
    weights = once_per_token_weights(forest, forest.row_index.with_values(np.concatenate(marks)))
    return [row[len(row) - len(mask) :] for row, mask in zip(weights, trained, strict=True)]
