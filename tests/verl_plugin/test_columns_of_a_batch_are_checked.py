"""Temperatures and path weights of a batch name their row where they cannot be used, before anything runs."""

from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import nested, ppo_batch
from hostile_rows import row, tokens, whole_batch
from verl.utils import tensordict_utils as tu

from tree_rl.training.rows import Rows
from tree_rl.tree.forest import RowError
from tree_rl.verl_plugin.engine.rows_in import LEAST_TEMPERATURE, read_rows
from tree_rl.verl_plugin.options import PATH_WEIGHT_COLUMNS
from tree_rl.verl_plugin.path_weights import path_weight_columns

WRONG = (0.0, -0.5, float("nan"), float("inf"))
TRUNK = tokens(1, 8)
BRANCHES = [row(TRUNK + tokens(2 + branch, 3)) for branch in range(3)]


def batch(temperature: Any) -> Any:
    data = ppo_batch(BRANCHES, calculate_entropy=True)
    del data["temperature"]
    if isinstance(temperature, torch.Tensor):
        data["temperature"] = temperature
    else:
        tu.assign_non_tensor(data, temperature=temperature)
    return data


@pytest.mark.parametrize("wrong", WRONG)
def test_a_row_of_its_own_temperature_is_named(wrong: float) -> None:
    with pytest.raises(RowError, match=rf"row 1 \(uid g\): .*rollout\.temperature above 0.*got {wrong}"):
        read_rows(batch(torch.tensor([1.0, wrong, 0.7])), vocab_size=97, max_positions=None)


@pytest.mark.parametrize("wrong", (0.0, float("nan"), "0.7", None))
def test_one_temperature_of_all_rows_is_checked(wrong: Any) -> None:
    with pytest.raises(RowError, match=r"row 0 .*rollout\.temperature above 0"):
        read_rows(batch(wrong), vocab_size=97, max_positions=None)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_step_without_verl_refuses_it_too(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"temperature=.*above 0"):
        Rows.of([[1, 2, 3]], temperature=wrong)


def test_verls_least_temperature_holds() -> None:
    tiny = batch(torch.tensor([1e-9, 0.4, 1.0]))
    found = read_rows(tiny, vocab_size=97, max_positions=None).temperature_B
    assert found.tolist() == np.array([LEAST_TEMPERATURE, 0.4, 1.0], dtype=np.float32).tolist()


@pytest.mark.parametrize(
    "weighting, wrong",
    [
        *((name, wrong) for name in PATH_WEIGHT_COLUMNS for wrong in (float("nan"), -0.5)),
        *((name, 1.5) for name in PATH_WEIGHT_COLUMNS if name != "custom"),
    ],
)
def test_a_weight_that_is_none_names_its_row(weighting: str, wrong: float) -> None:
    data, column = whole_batch(), PATH_WEIGHT_COLUMNS[weighting]
    entries = [torch.ones(len(mask), dtype=torch.float64) for mask in data["loss_mask"].unbind()]
    entries[2][-1] = wrong
    data[column] = nested(entries)
    with pytest.raises(RowError, match=rf"row 2 \(uid branches\): {column} holds {wrong}"):
        read_rows(data, vocab_size=97, max_positions=None, path_weighting=weighting)
    assert read_rows(data, vocab_size=97, max_positions=None).weight_F is None


def test_weights_longer_than_their_row_are_refused() -> None:
    data = whole_batch()
    data["tree_row_weights"] = nested([torch.ones(200, dtype=torch.float64) for _ in range(len(data))])
    with pytest.raises(RowError, match=r"row 0 .*more entries of tree_row_weights than tokens .got 200"):
        read_rows(data, vocab_size=97, max_positions=None, path_weighting="sep_avg")


def test_a_rejected_row_does_not_count() -> None:
    ids = [tokens(1, 6) + tokens(2 + row, 3) for row in range(3)]
    masks = [np.array([1] * 7), np.array([0] * 7), np.array([0, 0, 1, 1, 1, 1, 1])]
    columns = path_weight_columns(["token_unique", "sep_avg"], np.zeros(3, int), [np.array(one) for one in ids], masks)
    first, second, third = (one.tolist() for one in columns["tree_token_weights"].unbind())
    assert first == [1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 1.0]
    assert second == [0.0] * 7
    assert third == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0]
    assert {weight for one in columns["tree_row_weights"].unbind() for weight in one.tolist()} == {1 / 3}
