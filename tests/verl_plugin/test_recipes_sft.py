"""SFT on trees: verl's loss to rounding, conversations together, rows checked."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import weights
from sft_harness import TOKEN_ROWS, fitted, sft_config, write

from tree_rl.verl_plugin.sft import TreeSFTTrainer, group_rows
from tree_rl.verl_plugin.sft.checked_data import row_weights
from tree_rl.verl_plugin.sft.conversations import ConversationSampler, conversations_of_rows
from tree_rl.verl_plugin.sft.token_rows_dataset import TokenRowsDataset


def train(toy: Path, tmp_path: Path, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    files = [f"data.train_files={toy}/data/sft.parquet", f"model.path={toy}/model"]
    trainer = TreeSFTTrainer(sft_config(*files, f"trainer.default_local_dir={tmp_path}/checkpoints", *overrides))
    steps = fitted(trainer)
    return steps, weights(trainer.engine)


SMALL = ["data.train_batch_size=8", "data.group_key=conversation", "trainer.total_epochs=1", "optim.lr=1e-3"]


@pytest.mark.usefixtures("one_rank")
def test_tree_sft_is_stock_sft(toy: Path, tmp_path: Path) -> None:
    tree, tree_weights = train(toy, tmp_path / "tree", *SMALL, "engine.tree.mode=tree")
    flat, flat_weights = train(toy, tmp_path / "flat", *SMALL, "engine.tree.mode=flat")
    assert len(tree) == len(flat) == 3
    for ours, theirs in zip(tree, flat, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        # Two conversations of four rows each, which begin alike: the longest row holds the others.
        assert ours["tree/realised_saving"] > 0.5
    # AdamW divides by the root of the second moment, so gradients near zero move weights by rounding alone.
    for name, value in flat_weights.items():
        torch.testing.assert_close(tree_weights[name], value, rtol=1e-3, atol=2e-5)


def test_rows_that_share_half_belong_together() -> None:
    stem = list(range(10, 30))
    rows = [np.array(row) for row in (stem[:10], [*stem, 1], [1, 2, 3], stem[:3] + [7] * 20, [*stem, 2, 3], [1, 2, 9])]
    conversation = conversations_of_rows(rows)
    assert conversation[0] == conversation[1] == conversation[4]
    assert conversation[2] == conversation[5]
    assert len(set(conversation)) == 3


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_a_conversation_is_cut_only_where_a_batch_ends(num_replicas: int) -> None:
    generator = np.random.default_rng(0)
    group_of_row = generator.permutation(np.repeat(np.arange(20), generator.integers(1, 6, 20)))
    given = {"batch_rows": 4, "num_replicas": num_replicas, "shuffle": True}
    samplers = [ConversationSampler(group_of_row, rank=rank, **given) for rank in range(num_replicas)]
    epochs = []
    for epoch in range(2):
        per_rank = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            rows = list(sampler)
            assert len(rows) == len(sampler) == len(group_of_row) // (4 * num_replicas) * 4
            per_rank.append(np.array(rows).reshape(-1, 4))
        blocks = np.stack(per_rank, axis=1).reshape(-1, 4)
        assert len(np.unique(blocks)) == blocks.size
        homes: dict[int, set[int]] = {}
        for block, rows in enumerate(blocks):
            for row in rows:
                homes.setdefault(int(group_of_row[row]), set()).add(block)
        assert all(max(found) - min(found) <= math.ceil(5 / 4) for found in homes.values())
        epochs.append(blocks)
    assert not np.array_equal(*epochs)


def test_token_rows_are_read_and_grouped(tmp_path: Path) -> None:
    ids = [[5, 6, 7, 8], [9, 9, 9], [5, 6, 7, 9, 9]]
    masks = [[0, 0, 1, 1], [0, 1, 1], [0, 0, 1, 0, 1]]
    path = write(tmp_path / "rows.parquet", input_ids=ids, loss_mask=masks, episode=["a", "b", "a"])
    dataset = TokenRowsDataset(str(path), None, {"max_length": 10})
    assert [dataset[row]["input_ids"].tolist() for row in range(3)] == ids
    assert dataset[2]["loss_mask"].tolist() == masks[2]
    assert group_rows(dataset, "episode").tolist() == [0, 1, 0]
    by_prefix = group_rows(dataset, None)
    assert by_prefix[0] == by_prefix[2] != by_prefix[1]
    with pytest.raises(ValueError, match=r"data\.group_key='nothing'"):
        group_rows(dataset, "nothing")
    cut = TokenRowsDataset(str(path), None, {"max_length": 3, "truncation": "left"})
    assert cut[0]["input_ids"].tolist() == [6, 7, 8]
    assert cut[2]["loss_mask"].tolist() == [0, 0, 1]


@pytest.mark.usefixtures("one_rank")
def test_a_column_of_the_data_weighs_the_rows(toy: Path, tmp_path: Path) -> None:
    stems = np.random.default_rng(0).integers(5, 200, (2, 12)).tolist()
    ids = [[*stem, 7 + branch, 9, 11] for stem in stems for branch in range(4)]
    mask, nothing = [0] * 12 + [1] * 3, [0] * 15
    gain = [2.0, 0, 0, 2, 0, 2, 2, 0]
    weighted = write(tmp_path / "weighted.parquet", input_ids=ids, loss_mask=[mask] * 8, gain=gain)
    masks = [mask if weight else nothing for weight in gain]
    halved = write(tmp_path / "halved.parquet", input_ids=ids, loss_mask=masks)
    shared = [*TOKEN_ROWS, "data.train_batch_size=8", "trainer.total_epochs=1", "optim.clip_grad=1e9"]
    by_column = ["engine.tree.mode=tree", "++engine.tree.path_weighting=custom", "++engine.tree.custom_weights=gain"]
    (got,), _ = train(toy, tmp_path / "a", f"data.train_files={weighted}", *shared, *by_column)
    (expected,), _ = train(toy, tmp_path / "b", f"data.train_files={halved}", *shared, "engine.tree.mode=tree")
    # Half of the rows weigh 2, the others nothing; verl divides by the 24 trained tokens, and by 12 without the others.
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    # Rows that begin alike belong together: two stems of 12 shared tokens, and 4 * 3 own ones each.
    assert (got["tree/unique_tokens"], got["tree/flat_tokens"]) == (48, 120)


def test_a_wrong_column_of_weights_is_named(tmp_path: Path) -> None:
    ids, masks = [[5, 6], [7, 8]], [[0, 1], [0, 1]]
    path = write(tmp_path / "rows.parquet", input_ids=ids, loss_mask=masks, gain=[1.0, -2.0], name=["a", "b"])
    dataset = TokenRowsDataset(str(path), None, {})
    with pytest.raises(ValueError, match=r"custom_weights='gain': row 1: .* received .*-2\.0"):
        row_weights(dataset, "gain")
    with pytest.raises(ValueError, match="custom_weights='name': row 0: expected a finite number"):
        row_weights(dataset, "name")
    with pytest.raises(ValueError, match=r"custom_weights='weight': expected a column .* gain"):
        row_weights(dataset, "weight")
