"""Renders every SFT row once, as training will, before an engine is built, so that no bad row ends a run halfway.

Data-parallel ranks share the rows; each renders its share with `data.num_workers` processes, as training does.
"""

from typing import Any

import torch.distributed
from omegaconf import DictConfig
from torch.utils.data import DataLoader, Dataset

from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.quoting import escaped
from tree_rl.inspection.messages.template_form import REFUSALS as TEMPLATE_REFUSALS
from tree_rl.verl_plugin.sft.checked_data import places_of_rows
from tree_rl.verl_plugin.sft.token_rows_dataset import TokenRowsDataset

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


def refuse_unusable_rows(dataset: Any, data: DictConfig, *, key: str, vocab_size: int) -> None:
    """Refuse a data set with a row that cannot train. Collective: all ranks raise the same error.

    Args:
        dataset: verl's of messages, ours of token ids, or one of the user.
        data: verl's `data` node.
        key: key of the files in `data`.

    Raises:
        RowFileError: names file and number of the first such row, the number of such rows and the remedy.
    """
    if isinstance(dataset, TokenRowsDataset):
        # It has already checked every row.
        return
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    share = range(rank, len(dataset), num_ranks)
    tried = DataLoader(
        _TriedRows(dataset, vocab_size),
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

    def __init__(self, dataset: Any, vocab_size: int) -> None:
        self._dataset, self._vocab_size = dataset, vocab_size

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[bool, str | None]:
        try:
            row = self._dataset[index]
            ids, is_trained = row["input_ids"], bool(row["loss_mask"].any())
        except REFUSALS as error:
            said = str(error)
            remedy = next((text.format(said=escaped(said)) for word, text in REMEDIES.items() if word in said), None)
            if remedy is None:
                remedy = f"its data set or template refuses it: {escaped(f'{type(error).__name__}: {said}', 200)}; "
                remedy += "correct or drop the row"
            return False, remedy
        if ids.numel() == 0:
            return False, "expected at least one token, received none; drop the row"
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            outside = int(ids.max()) if ids.max() >= self._vocab_size else int(ids.min())
            return False, (
                f"expected ids in [0, {self._vocab_size}), received {outside}; name the tokenizer of the model "
                "(model.tokenizer_path)"
            )
        if row.get("multi_modal_inputs"):
            return False, "trees cannot merge images or videos; drop the row or set model.model_type=language_model"
        return is_trained, None
