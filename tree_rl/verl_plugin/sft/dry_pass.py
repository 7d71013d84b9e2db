"""Renders every SFT row once, as training will, before an engine is built, so that no bad row ends a run halfway.

Data-parallel ranks share the rows; each renders its share with `data.num_workers` processes, as training does.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed
from omegaconf import DictConfig
from torch.utils.data import DataLoader, Dataset

from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.quoting import escaped
from tree_rl.inspection.messages.template_form import REFUSALS as TEMPLATE_REFUSALS
from tree_rl.verl_plugin.sft.checked_data import places_of_rows
from tree_rl.verl_plugin.sft.token_rows_dataset import TokenRowsDataset, too_long

REFUSALS = (*TEMPLATE_REFUSALS, AssertionError, OSError)
"""Errors that a template, a tokenizer or a data set raises for a row that it does not expect."""
REMEDIES = {
    "ignore_input_ids_mismatch": (
        "the messages one by one are other tokens than the conversation (tool results in a row, thoughts that the "
        "template drops); drop the row, set model.custom_chat_template to a template without that, or train the "
        "messages one by one with data.ignore_input_ids_mismatch=true"
    ),
    "max_length": "longer than data.max_length ({said}); raise it, drop the row, or set data.truncation=right",
}
"""Our message by a word of verl's error, which `said` stands for."""
ROWS_OF_PROCESS = 200
"""Number of rows that justify starting a process."""
NUMBERS_SHOWN = 8


def refuse_unusable_rows(
    dataset: Any, data: DictConfig, *, key: str, vocab_size: int, on_trees: bool, max_positions: int | None
) -> None:
    """Refuse a data set, whose files `key` names in `data`, with a row that cannot train.

    Collective: all ranks raise the same RowFileError, which names file and number of the first such row, the number of
    such rows and the remedy.

    Args:
        vocab_size: upper bound of ids, exclusive.
        on_trees: False if verl's own forward runs the rows, which takes first tokens that train and any positions.
        max_positions: longest row that a tree of this model takes; None for no limit.
    """
    if isinstance(dataset, TokenRowsDataset):
        # It has already checked everything else of every row.
        dataset.check_for_model(vocab_size, max_positions if on_trees else None)
        return
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    share = range(rank, len(dataset), num_ranks)
    tried = DataLoader(
        _TriedRows(dataset, partial(_complaint, vocab_size=vocab_size, on_trees=on_trees, max_positions=max_positions)),
        sampler=share,
        batch_size=32,
        num_workers=min(data.num_workers, len(share) // ROWS_OF_PROCESS),
        collate_fn=list,
    )
    found = [answer for answers in tried for answer in answers]
    complaints = {row: text for row, (_, text) in zip(share, found, strict=True) if text is not None}
    gathered: list[Any] = [None] * num_ranks
    torch.distributed.all_gather_object(gathered, (complaints, sum(is_trained for is_trained, _ in found)))
    complaints = {row: text for of_rank, _ in gathered for row, text in of_rank.items()}
    if complaints:
        first, *others = sorted(complaints)
        more = ", ".join(str(row) for row in others[:NUMBERS_SHOWN]) + (", ..." if others[NUMBERS_SHOWN:] else "")
        also = f"; so are {len(others)} more of {len(dataset)} rows: {more}" if others else ""
        raise RowFileError(f"data.{key}: {places_of_rows(dataset, data, key)(first)}: {complaints[first]}{also}")
    trained = sum(count for _, count in gathered)
    if trained == 0:
        raise RowFileError(f"data.{key}: expected a row with a token that counts, received none; nothing would train")
    if trained < len(dataset) and rank == 0:
        print(f"tree SFT: data.{key}: {len(dataset) - trained} of {len(dataset)} rows have no token that counts")


class _TriedRows(Dataset):
    """Rows as (has a trained token, error or None)."""

    def __init__(self, dataset: Any, complaint_of: Callable[[Mapping[str, Any]], str | None]) -> None:
        self._dataset, self._complaint_of = dataset, complaint_of

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[bool, str | None]:
        try:
            row = self._dataset[index]
            complaint = self._complaint_of(row)
            is_trained = complaint is None and bool(row["loss_mask"].any())
        except REFUSALS as error:
            said = str(error)
            remedy = next((text.format(said=escaped(said)) for word, text in REMEDIES.items() if word in said), None)
            if remedy is None:
                remedy = f"its data set or template refuses it: {escaped(f'{type(error).__name__}: {said}', 200)}; "
                remedy += "correct or drop the row"
            return False, remedy
        return is_trained, complaint


def _complaint(row: Mapping[str, Any], *, vocab_size: int, on_trees: bool, max_positions: int | None) -> str | None:
    """Why a row cannot train; None if it can."""
    ids, mask, positions = (row[name] for name in ("input_ids", "loss_mask", "position_ids"))
    if ids.dim() != 1 or ids.is_floating_point():
        return f"expected input_ids of one dimension and whole numbers, received {ids.dtype} {list(ids.shape)}"
    if len(ids) == 0:
        return "expected at least one token, received none; drop the row"
    for name, column in (("loss_mask", mask), ("position_ids", positions)):
        if column.shape[-1] != len(ids):
            return f"expected a {name} entry for each of its {len(ids)} tokens, received {column.shape[-1]}"
    if ids.min() < 0 or ids.max() >= vocab_size:
        outside = int(ids.max()) if ids.max() >= vocab_size else int(ids.min())
        return (
            f"expected ids in [0, {vocab_size}), received {outside}; name the tokenizer of the model "
            "(model.tokenizer_path)"
        )
    if row.get("multi_modal_inputs"):
        return "trees cannot merge images or videos; drop the row or set model.model_type=language_model"
    if not on_trees:
        return None
    if mask[0]:
        return (
            "loss_mask trains its first token, which nothing predicts; set its first entry to 0, or for messages "
            "model.custom_chat_template to one that begins a turn with its role"
        )
    if positions.dim() == 1 and (positions.diff() != 1).any():
        return "position_ids do not count its tokens, as a tree does; let them, or set tree.mode=flat"
    return too_long(len(ids), max_positions)
