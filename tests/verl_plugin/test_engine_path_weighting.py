"""Opt-in path weights: sep_avg is the mean of independent branch losses (paper, eq. 1), token_unique counts once."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import build_engine, gradients, ppo_batch, save_model, tiny_qwen3
from equivalence import actor_loss, run
from hostile_rows import SHAPES, row, tokens
from verl.workers.utils.losses import sft_loss

from tree_rl.verl_plugin.options import TreeConfig


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tiny_qwen3())


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
            selected = index_select(data, index)
            value, _ = engine.forward_step(with_normalisers(selected, data), loss, forward_only=False)
            value.backward()
            runs.append((float(value), gradients(engine)))
    return runs


def index_select(data: Any, index: int) -> Any:
    from verl.utils import tensordict_utils as tu

    return tu.index_select_tensor_dict(data, [index])


def with_normalisers(selected: Any, data: Any) -> Any:
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(selected, sp_size=1, dp_size=1, batch_num_tokens=float(data["loss_mask"].values().sum()))
    return selected


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    largest = max(g.norm() for g in expected.values())
    for name, reference in expected.items():
        assert (got[name] - reference).norm() <= 4e-5 * max(reference.norm(), 1e-3 * largest), name


@pytest.mark.parametrize("loss_mode, agg_mode", (("vanilla", "token-sum"), ("gspo", "seq-mean-token-mean")))
def test_sep_avg_is_the_mean_of_independent_branch_losses(model_path: Path, loss_mode: str, agg_mode: str) -> None:
    rows = SHAPES["comb"]
    loss = actor_loss(loss_mode, agg_mode)
    got = weighted_run(model_path, "sep_avg", rows, loss)
    alone = separate_runs(model_path, rows, loss)
    assert sum(got["loss"]) == pytest.approx(sum(value for value, _ in alone) / len(rows), rel=1e-4)
    mean = {name: sum(g[name] for _, g in alone) / len(rows) for name in alone[0][1]}
    assert_close(got["gradients"], mean)


def test_sep_avg_counts_the_rows_of_each_tree(model_path: Path) -> None:
    rows = [*SHAPES["comb"], *(row(tokens(90 + i, 6), uid="other") for i in range(2))]
    loss = actor_loss("vanilla", "token-sum")
    got = weighted_run(model_path, "sep_avg", rows, loss)
    alone = separate_runs(model_path, rows, loss)
    share = [1 / 4] * 4 + [1.0, 1.0]
    expected = {name: sum(w * g[name] for w, (_, g) in zip(share, alone, strict=True)) for name in alone[0][1]}
    assert_close(got["gradients"], expected)


def test_sep_avg_survives_a_budget_that_cuts_the_tree(model_path: Path) -> None:
    rows = SHAPES["branches"]
    loss = actor_loss("vanilla", "token-sum")
    whole = weighted_run(model_path, "sep_avg", rows, loss)
    split = weighted_run(model_path, "sep_avg", rows, loss, max_tokens=20)
    assert split["metrics"]["tree/partitions"].aggregate() > 1
    assert sum(split["loss"]) == pytest.approx(sum(whole["loss"]), rel=1e-4)
    assert_close(split["gradients"], whole["gradients"])


def test_token_unique_trains_a_shared_token_once(model_path: Path) -> None:
    trunk = tokens(1, 8)
    loss = partial(sft_loss, config=None)

    def batch(rows: list[Any]) -> Any:
        data = ppo_batch(rows, calculate_entropy=False)
        pairs = zip(data["input_ids"].unbind(), data["response_mask"].unbind(), strict=True)
        full = [torch.cat([mask.new_zeros(len(ids) - len(mask)), mask]) for ids, mask in pairs]
        data["loss_mask"] = torch.nested.as_nested_tensor(full, layout=torch.jagged)
        return data

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
    assert_close(weighted["gradients"], scaled)


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
    assert_close(runs[0]["gradients"], runs[1]["gradients"])
    assert max(g.abs().max() for g in runs[0]["gradients"].values()) > 0
