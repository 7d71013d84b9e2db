"""Groups whose rows lie on two ranks train as groups on one: every loss and aggregation, path weights included."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import build_engine, save_model, tiny_qwen3
from equivalence import AGG_MODES, actor_loss, assert_equal_gradients, run
from hostile_rows import tokens
from layouts_of_four_ranks import whole_batch, whole_rows
from rank_engines import join, spawn, update
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tree_rl.cost.balance.batch import number_groups
from tree_rl.tree.forest import RowError
from tree_rl.verl_plugin.engine.rows_in import read_rows
from tree_rl.verl_plugin.options import PATH_WEIGHT_COLUMNS, TreeConfig
from tree_rl.verl_plugin.path_weights import path_weight_columns

ROW_LOSSES = ("gspo", "dro", "sapo")
CASES = [
    *(("verl", "vanilla", mode) for mode in AGG_MODES),
    *(("verl", loss, "seq-mean-token-mean") for loss in ROW_LOSSES),
    *((weighting, "vanilla", mode) for weighting, mode in zip(PATH_WEIGHT_COLUMNS, AGG_MODES[2:4], strict=True)),
    *((weighting, "gspo", "seq-mean-token-mean") for weighting in PATH_WEIGHT_COLUMNS),
]
WEIGHTINGS = ("verl", *PATH_WEIGHT_COLUMNS)


def batch_with_weights() -> TensorDict:
    """Hostile groups, with the columns of weights that the trainer adds."""
    data, rows = whole_batch(), whole_rows()
    columns = path_weight_columns(
        list(PATH_WEIGHT_COLUMNS),
        number_groups([one.uid for one in rows]),
        [np.array(one.tokens) for one in rows],
        [np.array(one.mask) for one in rows],
    )
    for name, column in columns.items():
        data[name] = column
    return data


def share_of(rank: int) -> TensorDict:
    """Every other row: each group lies on both ranks."""
    data = batch_with_weights()
    return tu.index_select_tensor_dict(data, list(range(rank, len(data), 2)))


def build(model: str | Path, weighting: str) -> Any:
    """A tree engine that cuts the larger groups into partitions."""
    return build_engine(
        Path(model), tree=TreeConfig(mode="tree", max_tokens=20, path_weighting=weighting, self_check=False)
    )


def rank_main(rank: int, world: int, model: str, out: str, port: int) -> None:
    """This rank's share under every loss."""
    join(rank, world, port)
    engines = {weighting: build(model, weighting) for weighting in WEIGHTINGS}
    results: dict[Any, Any] = {}
    for weighting, loss, mode in CASES:
        got = update(engines[weighting], share_of(rank), actor_loss(loss, mode))
        results[weighting, loss, mode] = got["gradients"], sum(got["output"]["loss"])
    torch.save(results, f"{out}/split_{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("split")
    save_model(path / "model", tiny_qwen3())
    spawn(rank_main, 2, path)
    return path


@pytest.fixture(scope="module")
def parts(out: Path) -> list[Any]:
    """What the two ranks found, by case."""
    return [torch.load(out / f"split_{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def engines(out: Path) -> dict[str, Any]:
    """One rank that runs whole groups, by path weighting."""
    return {weighting: build(out / "model", weighting) for weighting in WEIGHTINGS}


@pytest.mark.parametrize("weighting, loss, mode", CASES)
def test_split_groups_train_as_whole_ones(
    parts: list[Any], engines: dict[str, Any], weighting: str, loss: str, mode: str
) -> None:
    whole = run(engines[weighting], whole_batch(), actor_loss(loss, mode))
    split = [part[weighting, loss, mode] for part in parts]
    assert sum(value for _, value in split) / 2 == pytest.approx(sum(whole["loss"]), rel=1e-4)
    assert_equal_gradients(whole["gradients"], split[0][0])


@pytest.mark.parametrize("weighting", PATH_WEIGHT_COLUMNS)
@pytest.mark.parametrize("wrong", (float("nan"), 1.5))
def test_a_weight_that_is_none_names_its_row(weighting: str, wrong: float) -> None:
    data = batch_with_weights()
    column = PATH_WEIGHT_COLUMNS[weighting]
    entries = [entry.clone() for entry in data[column].unbind()]
    entries[2][-1] = wrong
    data[column] = torch.nested.as_nested_tensor(entries, layout=torch.jagged)
    with pytest.raises(RowError, match=rf"row 2 \(uid branches\): {column} holds {wrong}"):
        read_rows(data, vocab_size=97, max_positions=None, path_weighting=weighting)
    assert read_rows(data, vocab_size=97, max_positions=None).weight_F is None


def test_weights_longer_than_their_row_are_refused() -> None:
    data = batch_with_weights()
    entries = [torch.ones(200, dtype=torch.float64) for _ in range(len(data))]
    data["tree_row_weights"] = torch.nested.as_nested_tensor(entries, layout=torch.jagged)
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
