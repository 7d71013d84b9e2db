"""Checks SFT data before an engine uses a GPU; errors name the file, the row and the config key."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
from omegaconf import DictConfig, ListConfig

from tree_rl.inspection.files import InputError, RowFileError
from tree_rl.inspection.files.open_file import reason
from tree_rl.inspection.files.parquet import read_parquet
from tree_rl.inspection.files.quoting import escaped, quoted, quoted_names, quoted_path
from tree_rl.inspection.messages.template_form import REFUSALS as TEMPLATE_REFUSALS
from tree_rl.verl_plugin.sft.conversations import conversations_of_rows
from tree_rl.verl_plugin.sft.decoded_messages import decode_messages
from tree_rl.verl_plugin.sft.token_rows_dataset import TokenRowsDataset


@contextmanager
def readable_files(data: DictConfig) -> Iterator[None]:
    """Check the files of verl's dataset, and name them if reading fails; custom datasets check theirs.

    Raises:
        InputError: there is no file, one is no regular parquet file, is damaged or has no column of messages, or the
            chat template takes no message.
    """
    if not _paths(data.train_files):
        raise InputError("data.train_files: expected a file, received none; name a parquet file")
    if data.custom_cls.get("path") is not None:
        yield
        return
    for key in ("train_files", "val_files"):
        for path in _local_files(data.get(key)):
            names = read_parquet(path, ())[1]
            if data.messages_key not in names:
                raise InputError(
                    f"data.{key}: {quoted_path(path)}: expected a column {quoted(data.messages_key)} "
                    f"(data.messages_key), received {quoted_names(names)}; for token ids set data.custom_cls"
                )
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        said = escaped(reason(error) if isinstance(error, OSError) else str(error), 160)
        raise InputError(
            f"data.train_files or data.val_files: expected whole parquet files, but reading fails: {said}; write or "
            "copy them again"
        ) from error
    except TEMPLATE_REFUSALS as error:
        said = escaped(f"{type(error).__name__}: {error}", 200)
        raise InputError(
            "data.train_files, data.val_files or model.path: expected files and a chat template of which verl builds "
            f"its data set (it renders one message of the user, and two), but that fails: {said}; correct them, or set "
            "model.custom_chat_template"
        ) from error


def check_rows(dataset: Any, data: DictConfig, *, key: str) -> None:
    """Decode messages; refuse fewer rows than a batch, which would train nothing. `key` names the files in `data`.

    Raises a RowFileError, which names a row whose messages cannot be read.
    """
    if data.custom_cls.get("path") is None:
        decode_messages(dataset, data, key=key, place=places_of_rows(dataset, data, key))
    refuse_less_than_a_batch(dataset, data, key=key, what="rows")


def refuse_less_than_a_batch(dataset: Any, data: DictConfig, *, key: str, what: str) -> None:
    """Raise a RowFileError for a dataset of fewer rows, or `what` else it holds, than a batch."""
    if len(dataset) < data.train_batch_size:
        raise RowFileError(
            f"data.{key}: expected at least the {data.train_batch_size} {what} of a batch, received {len(dataset)}; "
            f"lower data.train_batch_size or add {what}"
        )


def group_rows(dataset: Any, group_key: str | None) -> np.ndarray | None:
    """Number of the conversation of every row, int64 [rows]; None without `group_key` and without token ids.

    The column `group_key` of the dataset's `dataframe` identifies the conversation.

    Raises:
        InputError: there is no such column, or a row has no value in it.
    """
    if group_key is not None:
        table = getattr(dataset, "dataframe", None)
        if table is None or group_key not in table.columns:
            raise InputError(
                f"data.group_key={group_key!r}: expected a column of the dataset, which has {_columns(table)}; name "
                "one, or set it to null"
            )
        # In columns of Arrow's types, which verl reads, pandas takes NaN for a value.
        absent = np.array([value is None or value is pd.NA or value != value for value in _plain(table[group_key])])
        if absent.any():
            row = int(np.argmax(absent))
            raise RowFileError(f"data.group_key={group_key!r}: row {row}: expected a conversation, received nothing")
        # Texts of arrays leave out the middle of long ones.
        names = np.array(list(map(str, _plain(table[group_key]))), dtype=object)
        return np.asarray(pd.factorize(names)[0], dtype=np.int64)
    if isinstance(dataset, TokenRowsDataset):
        return conversations_of_rows([ids for ids, _ in dataset.rows])
    return None


def _plain(column: pd.Series) -> list[Any]:
    """Values of a column, arrays as lists."""
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in column]


def row_weights(dataset: Any, column: str) -> np.ndarray:
    """Weight of each row in the loss, float64 [rows]: a column of the dataset's `dataframe`.

    Raises:
        InputError: there is no such column, or a row has no finite number of at least 0 in it.
    """
    table = getattr(dataset, "dataframe", None)
    if table is None or column not in table.columns:
        raise InputError(
            f"engine.tree.custom_weights={column!r}: expected a column of the dataset, which has {_columns(table)}; "
            "name one"
        )
    weights = pd.to_numeric(table[column], errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    wrong = ~(np.isfinite(weights) & (weights >= 0))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise RowFileError(
            f"engine.tree.custom_weights={column!r}: row {row}: expected a finite number of at least 0, received "
            f"{table[column].iloc[row]!r}"
        )
    return weights


def _columns(table: pd.DataFrame | None) -> str:
    return ("" if table is None else quoted_names(list(map(str, table.columns)))) or "no columns"


def places_of_rows(dataset: Any, data: DictConfig, key: str) -> Callable[[int], str]:
    """A function that describes a row of verl's dataset by its file and its number there, from 0.

    For other datasets it gives the number in all files. `key` is the key of the files in verl's node `data`.
    """
    paths = _paths(getattr(dataset, "parquet_files", data.get(key)))
    is_drawn = getattr(dataset, "shuffle", False) and getattr(dataset, "max_samples", -1) > 0
    if data.custom_cls.get("path") is not None or is_drawn:
        names = ", ".join(quoted_path(Path(path)) for path in paths)
        return lambda row: f"row {row} of the data set of {names}"
    ends = np.cumsum([pyarrow.parquet.read_metadata(path).num_rows for path in paths])

    def place(row: int) -> str:
        file = int(np.searchsorted(ends, row, side="right"))
        return f"{quoted_path(Path(paths[file]))}: row {row - (ends[file - 1] if file else 0)}"

    return place


def _local_files(files: Any) -> list[Path]:
    """Paths on this machine; verl copies paths with a scheme, such as hdfs://, later."""
    return [Path(path) for path in _paths(files) if "://" not in path]


def _paths(files: Any) -> list[str]:
    if not files:
        return []
    return list(map(str, files if isinstance(files, list | tuple | ListConfig) else [files]))
