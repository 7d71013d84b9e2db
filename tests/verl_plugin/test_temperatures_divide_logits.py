"""A temperature that cannot divide logits names its row before anything runs; verl's least one holds here, too."""

from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import ppo_batch
from hostile_rows import row, tokens
from omegaconf import OmegaConf
from verl.utils import tensordict_utils as tu

from tree_rl.training.rows import Rows
from tree_rl.tree.forest import RowError
from tree_rl.verl_plugin.engine.rows_in import LEAST_TEMPERATURE, read_rows
from tree_rl.verl_plugin.refusals.refusal import Of, UnsupportedFeatureError
from tree_rl.verl_plugin.refusals.table import refuse_if_unsupported

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


def test_the_trainers_refuse_it_where_nothing_looks_at_the_command_line() -> None:
    config = OmegaConf.create({"algorithm": {}, "actor_rollout_ref": {"rollout": {"temperature": 0}}})
    with pytest.raises(UnsupportedFeatureError, match=r"actor_rollout_ref\.rollout\.temperature=0:"):
        refuse_if_unsupported(config, "", Of.JOB)
    config.actor_rollout_ref.rollout = {"temperature": 1, "val_kwargs": {"temperature": "0"}}
    with pytest.raises(UnsupportedFeatureError, match=r"rollout\.val_kwargs\.temperature=0:"):
        refuse_if_unsupported(config, "", Of.JOB)


def test_verls_least_temperature_holds() -> None:
    tiny = batch(torch.tensor([1e-9, 0.4, 1.0]))
    found = read_rows(tiny, vocab_size=97, max_positions=None).temperature_B
    assert found.tolist() == np.array([LEAST_TEMPERATURE, 0.4, 1.0], dtype=np.float32).tolist()
