"""Opt-in path weights: a column of the trainer weighs rows as it says, whole, in partitions, on two ranks.

That sep_avg and token_unique are the paper's is proven in tests/tree, and for a trainer's step beside this file."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import build_engine, gradients, nested, ppo_batch, with_whole_masks
from equivalence import LOSS, assert_equal_gradients, infer, run
from hostile_rows import row, tokens, whole_batch, whole_rows
from rank_engines import empty_batch
from rank_processes import run_ranks
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import sft_loss

from tree_rl.cost.balance.batch import number_groups
from tree_rl.tree.forest import RowError
from tree_rl.verl_plugin.engine.outputs_back import even_out, metric_of
from tree_rl.verl_plugin.options import PATH_WEIGHT_COLUMNS, TreeConfig
from tree_rl.verl_plugin.path_weights import path_weight_columns


def hostile_batch(weighting: str) -> tuple[TensorDict, np.ndarray]:
    """Hostile groups with the trainer's column of weights, and the weight of each row: sessions have three rows."""
    data, rows = whole_batch(), whole_rows()
    own = np.random.default_rng(5).uniform(0, 3, len(rows))
    own[4] = 0.0
    session_of_row = np.arange(len(rows)) // 3
    ids, masks = [np.array(one.tokens) for one in rows], [np.array(one.mask) for one in rows]
    custom = [np.full(len(mask), weight) for mask, weight in zip(masks, own, strict=True)]
    groups, given = number_groups([one.uid for one in rows]), {"session_of_row": session_of_row, "custom": custom}
    (column,) = path_weight_columns([weighting], groups, ids, masks, **given).values()
    data[PATH_WEIGHT_COLUMNS[weighting]] = column
    tree_of_row = number_groups([f"{one.uid} {one.tokens[0]}" for one in rows])
    of_rows = {"custom": own, "session": shares_of(session_of_row), "sep_avg": shares_of(tree_of_row)}
    return data, of_rows[weighting]


def shares_of(group_of_row: np.ndarray) -> np.ndarray:
    """One over the rows of each row's group."""
    return 1 / np.bincount(group_of_row)[group_of_row]


WEIGHED = {"session": None, "custom": 16, "sep_avg": 16}
"""Weighting, and budget."""


@pytest.fixture(scope="module")
def rows_alone(model_path: Path) -> list[dict[str, torch.Tensor]]:
    """Gradients of stock verl on each hostile row alone, with the normalisers of the whole batch."""
    engine, data = build_engine(model_path, tree=None), whole_batch()
    found = []
    for index in range(len(data)):
        engine.optimizer_zero_grad()
        with engine.train_mode(disable_auto_offload=True):
            selected = tu.index_select_tensor_dict(data, [index])
            trained = float(data["loss_mask"].values().sum())
            tu.assign_non_tensor(selected, sp_size=1, dp_size=1, batch_num_tokens=trained)
            value, _ = engine.forward_step(selected, LOSS, forward_only=False)
            value.backward()
            found.append(gradients(engine))
    return found


def weighted_sum(alone: list[dict[str, torch.Tensor]], weights: np.ndarray) -> dict[str, torch.Tensor]:
    pairs = list(zip(alone, weights.tolist(), strict=True))
    return {name: sum(weight * gradient[name] for gradient, weight in pairs) for name in alone[0]}


@pytest.mark.parametrize("weighting", WEIGHED)
def test_only_weights_that_follow_from_the_rows_need_no_column(
    model_path: Path, rows_alone: list[dict[str, torch.Tensor]], weighting: str
) -> None:
    engine, data = build_engine(model_path, tree=TreeConfig(mode="tree", path_weighting=weighting)), whole_batch()
    # A pass before the update has no weights, and no use for them.
    infer(engine, data)
    if weighting == "sep_avg":
        expected = weighted_sum(rows_alone, hostile_batch(weighting)[1])
        assert_equal_gradients(expected, run(engine, data, LOSS)["gradients"])
    else:
        with pytest.raises(RowError, match=rf"path_weighting={weighting}: expected a column .*trainer_mode=tree_sync"):
            run(engine, data, LOSS)


def rank_main(rank: int, model: Path) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """Gradients of every second row, and of all rows on the first rank."""
    gradients_of = {}
    for weighting, budget in WEIGHED.items():
        tree = TreeConfig(mode="tree", path_weighting=weighting, max_tokens=budget)
        engine, whole = build_engine(model, tree=tree), hostile_batch(weighting)[0]
        data = tu.index_select_tensor_dict(whole, list(range(rank, len(whole_rows()), 2)))
        gradients_of[weighting, "in turns"] = run(engine, data, LOSS)["gradients"]
        gradients_of[weighting, "on one rank"] = run(engine, empty_batch() if rank else whole, LOSS)["gradients"]
    return gradients_of


def test_rows_weigh_what_their_column_says(model_path: Path, rows_alone: list[dict[str, torch.Tensor]]) -> None:
    for (weighting, _), got in run_ranks(rank_main, 2, model_path)[0].items():
        assert_equal_gradients(weighted_sum(rows_alone, hostile_batch(weighting)[1]), got)


def test_in_sft_a_conversation_is_a_session(model_path: Path) -> None:
    rows = [row(tokens(seed, 8), uid=uid) for seed, uid in enumerate("aab")]
    # SFT's rows come without a response mask.
    data, found = with_whole_masks(ppo_batch(rows, calculate_entropy=False)).exclude("response_mask"), []
    weights = nested([torch.full((8,), weight).double() for weight in (0.5, 0.5, 1.0)])
    for weighting, columns in (("session", {}), ("custom", {PATH_WEIGHT_COLUMNS["custom"]: weights})):
        engine = build_engine(model_path, tree=TreeConfig(mode="tree", path_weighting=weighting))
        found.append(run(engine, data.update(columns), partial(sft_loss, config=None))["gradients"])
    assert_equal_gradients(found[1], found[0])


def test_a_rank_that_reports_less_leaves_joined_metrics_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    sums, means, least = (AggregationType(name) for name in ("sum", "mean", "min"))
    full = {"loss": (sums, [1.0, 2.0]), "share": (means, [0.2, 0.4]), "least": (least, [0.5, 0.7])}
    part = {"loss": (sums, [3.0])}

    def gather(found: list[Any], mine: Any, group: Any = None) -> None:
        found[:] = [(full, []), (part, [])]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    ranks = []
    for reported in (full, part):
        metrics = {key: metric_of(kind, values) for key, (kind, values) in reported.items()}
        ranks.append(even_out(metrics, 2, None))
    joined = {key: Metric.aggregate_dp([rank[key] for rank in ranks]) for key in full}
    assert joined == pytest.approx({"loss": (1 + 2 + 3) / 2, "share": 0.3, "least": 0.5})
