"""Path weights come as columns, as the trainer adds them for groups that lie on several ranks: bad ones name their row.

That split groups train as whole ones, test_losses_average_over_the_rows_of_a_step.py holds.
"""

import numpy as np
import pytest
import torch
from hostile_rows import tokens
from layouts_of_four_ranks import whole_batch, whole_rows
from tensordict import TensorDict

from tree_rl.cost.balance.batch import number_groups
from tree_rl.tree.forest import RowError
from tree_rl.verl_plugin.engine.rows_in import read_rows
from tree_rl.verl_plugin.options import PATH_WEIGHT_COLUMNS
from tree_rl.verl_plugin.path_weights import path_weight_columns


def batch_with_weights() -> TensorDict:
    """Hostile groups, with the columns of weights that the trainer adds."""
    data, rows = whole_batch(), whole_rows()
    columns = path_weight_columns(
        list(PATH_WEIGHT_COLUMNS),
        number_groups([one.uid for one in rows]),
        [np.array(one.tokens) for one in rows],
        [np.array(one.mask) for one in rows],
        session_of_row=np.arange(len(rows)),
        custom=[np.ones(len(one.mask)) for one in rows],
    )
    for name, column in columns.items():
        data[name] = column
    return data


@pytest.mark.parametrize(
    "weighting, wrong",
    [
        *((name, wrong) for name in PATH_WEIGHT_COLUMNS for wrong in (float("nan"), -0.5)),
        *((name, 1.5) for name in PATH_WEIGHT_COLUMNS if name != "custom"),
    ],
)
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
