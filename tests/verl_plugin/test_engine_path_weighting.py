"""Opt-in path weights: sep_avg is the mean of independent branch losses (paper, eq. 1), token_unique counts once."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import build_engine, gradients, ppo_batch
from equivalence import actor_loss, assert_equal_gradients, run
from hostile_rows import SHAPES, row, tokens
from layouts_of_four_ranks import with_whole_masks
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import sft_loss

from tree_rl.verl_plugin.options import TreeConfig


def weighted_run(path: Path, weighting: str, rows: list[Any], loss: Any, **tree: Any) -> dict[str, Any]:
    engine = build_engine(path, tree=TreeConfig(mode="tree", path_weighting=weighting, **tree))
    return run(engine, ppo_batch(rows, calculate_entropy=True), loss)


def separate_runs(path: Path, rows: list[Any], loss: Any) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients of stock verl on each row alone, with the normalisers of the whole batch."""
    engine = build_engine(path, tree=None)
    data = ppo_batch(rows, calculate_entropy=True)
    runs = []
    for index in range(len(rows)):
        engine.optimizer_zero_grad()
        with engine.train_mode(disable_auto_offload=True):
            selected = tu.index_select_tensor_dict(data, [index])
            trained = float(data["loss_mask"].values().sum())
            tu.assign_non_tensor(selected, sp_size=1, dp_size=1, batch_num_tokens=trained)
            value, _ = engine.forward_step(selected, loss, forward_only=False)
            value.backward()
            runs.append((float(value), gradients(engine)))
    return runs


@pytest.mark.parametrize("loss_mode, agg_mode", (("vanilla", "token-sum"), ("gspo", "seq-mean-token-mean")))
def test_sep_avg_is_the_mean_of_independent_branch_losses(model_path: Path, loss_mode: str, agg_mode: str) -> None:
    rows = SHAPES["comb"]
    loss = actor_loss(loss_mode, agg_mode)
    got = weighted_run(model_path, "sep_avg", rows, loss)
    alone = separate_runs(model_path, rows, loss)
    assert sum(got["loss"]) == pytest.approx(sum(value for value, _ in alone) / len(rows), rel=1e-4)
    mean = {name: sum(g[name] for _, g in alone) / len(rows) for name in alone[0][1]}
    assert_equal_gradients(mean, got["gradients"])


def test_token_unique_trains_a_shared_token_once(model_path: Path) -> None:
    trunk = tokens(1, 8)
    loss = partial(sft_loss, config=None)

    def batch(rows: list[Any]) -> Any:
        return with_whole_masks(ppo_batch(rows, calculate_entropy=False))

    branches = [trunk + tokens(2, 3), trunk + tokens(3, 4)]
    shared = [row(ids) for ids in branches]
    # The same unique tokens, each trained in exactly one row.
    once = [row(branches[0]), row(branches[1], mask=[0] * 6 + [1] * 4)]
    weighted = run(
        build_engine(model_path, tree=TreeConfig(mode="tree", path_weighting="token_unique")), batch(shared), loss
    )
    plain = run(build_engine(model_path, tree=TreeConfig(mode="tree")), batch(once), loss)
    # verl divides by the trained tokens of all rows, repeated ones included: 9 + 10 against 9 + 4.
    scaled = {name: g * (9 + 4) / (9 + 10) for name, g in plain["gradients"].items()}
    assert_equal_gradients(scaled, weighted["gradients"])


def test_token_unique_does_not_count_rows_that_a_rejection_removed(model_path: Path) -> None:
    trunk = tokens(1, 8)
    rows = [row(trunk + tokens(2, 3)), row(trunk + tokens(3, 4))]
    data = ppo_batch(rows, calculate_entropy=True)
    kept, removed = data["response_mask"].unbind()
    data["response_mask"] = torch.nested.as_nested_tensor([kept, torch.zeros_like(removed)], layout=torch.jagged)
    loss = actor_loss("vanilla", "token-sum")
    runs = [
        run(build_engine(model_path, tree=TreeConfig(mode="tree", path_weighting=weighting)), data, loss)
        for weighting in ("token_unique", "verl")
    ]
    # One row is left, so every one of its tokens weighs 1.
    assert_equal_gradients(runs[1]["gradients"], runs[0]["gradients"])
    assert max(g.abs().max() for g in runs[0]["gradients"].values()) > 0
