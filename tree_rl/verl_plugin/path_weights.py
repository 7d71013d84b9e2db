"""Weights of `tree.path_weighting`, computed over whole groups before their rows are distributed to ranks.

A rank may have only part of a group, so engines cannot count K or g_t. Legend: B rows.
"""

from collections.abc import Sequence

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from tree_rl.tree.forest import Forest
from tree_rl.tree.weights import once_per_token_weights, tree_mean_weights
from tree_rl.verl_plugin.options import PATH_WEIGHT_COLUMNS

ENGINE_CONFIGS = ("actor_rollout_ref.actor.fsdp_config", "critic.fsdp")
"""Keys of the options of engines that train."""


def wanted_weightings(config: DictConfig) -> list[str]:
    """The values of `tree.path_weighting` of the engines that train, if they need a column."""
    nodes = [OmegaConf.select(config, f"{path}.tree.path_weighting") for path in ENGINE_CONFIGS]
    return sorted({str(value) for value in nodes} & PATH_WEIGHT_COLUMNS.keys())


def path_weight_columns(
    weightings: Sequence[str],
    group_of_row: np.ndarray,
    row_tokens: Sequence[np.ndarray],
    trained: Sequence[np.ndarray],
) -> dict[str, torch.Tensor]:
    """Nested float64 columns, one entry per response token: 1 / K of the row's tree, or 1 / g_t where trained.

    Args:
        weightings: `sep_avg`, `token_unique`.
        group_of_row: int [B], the prompt of each row; prompts have separate trees.
        row_tokens: B arrays of token ids, prompt and response.
        trained: B arrays, nonzero where the loss counts a token; aligned with the row's end.
    """
    columns: dict[str, list[torch.Tensor]] = {name: [torch.empty(0)] * len(trained) for name in weightings}
    for group in np.unique(group_of_row).tolist():
        rows = np.flatnonzero(group_of_row == group).tolist()
        forest = Forest.from_rows([row_tokens[row] for row in rows])
        mean_B = tree_mean_weights(forest)
        for local, weight in enumerate(weights_within(forest, [trained[row] for row in rows])):
            by_name = {"sep_avg": np.full(len(weight), mean_B[local]), "token_unique": weight}
            for name in weightings:
                columns[name][rows[local]] = torch.from_numpy(by_name[name])
    return {
        PATH_WEIGHT_COLUMNS[name]: torch.nested.as_nested_tensor(entries, layout=torch.jagged)
        for name, entries in columns.items()
    }


def weights_within(forest: Forest, trained: Sequence[np.ndarray]) -> list[np.ndarray]:
    """1 / (rows that train the token) where trained, else 0: one float64 array per row, as long as its mask.

    `trained` has a mask per row, nonzero where its token is trained and aligned with the row's end.
    """
    marks = [
        np.pad(mask != 0, (size - len(mask), 0)) for mask, size in zip(trained, forest.row_index.lengths, strict=True)
    ]
    weights = once_per_token_weights(forest, forest.row_index.with_values(np.concatenate(marks)))
    return [row[len(row) - len(mask) :] for row, mask in zip(weights, trained, strict=True)]
