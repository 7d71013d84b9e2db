"""Preference pairs from parquet files as rows of token ids, in TRL's formats; errors name the file and the row.

A pair has the columns `chosen` and `rejected`, and `prompt` unless both begin with it: lists of messages, texts, or
lists of token ids. Messages may have the columns `tools` and `system`, which are read as `tree-rl inspect` does.
"""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import torch
from torch.utils.data import Dataset

from tree_rl.inspection.chat_rows import SYSTEM_TEXT, TOOLS
from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.integer_lists import mark_lists, token_id_lists
from tree_rl.inspection.files.parquet import read_parquet, values_of
from tree_rl.inspection.files.quoting import escaped, quoted, quoted_names, quoted_path
from tree_rl.inspection.messages.conversation import Chat, holds_messages, read_chat
from tree_rl.inspection.messages.json_cells import without_padding
from tree_rl.inspection.messages.roles import ASSISTANT
from tree_rl.inspection.messages.template_form import REFUSALS, TemplateForm
from tree_rl.verl_plugin.engine.pair_loss import REFERENCE
from tree_rl.verl_plugin.sft.checked_data import group_rows
from tree_rl.verl_plugin.sft.conversations import CONVERSATION, groups_of_prompts
from tree_rl.verl_plugin.sft.decoded_messages import form_of
from tree_rl.verl_plugin.sft.token_rows_dataset import SHORTER, IdsAndMask, row_for_collator

PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
SIDES = (CHOSEN, REJECTED)
KINDS = MESSAGES, TEXT, IDS = ("messages", "a text", "token ids")
MASKS = {side: f"{side}_mask" for side in SIDES}
"""Column with a 1 for each token id of a side that is trained; without it all of them are."""
SHORTEST_COPY = 4
"""Token ids or characters of a prompt whose copy in both answers is a mistake; they may begin with a shorter one."""


Pair = tuple[IdsAndMask, IdsAndMask]
"""Chosen and rejected row with one prompt; a row trains tokens behind it."""


@dataclass(kw_only=True, eq=False)
class PreferenceRows(Dataset):
    """Pairs of rows."""

    pairs: list[Pair]
    group_of_pair: np.ndarray
    """int64 [pairs]; equal for pairs with equal prompts, or prompts that begin with another one."""
    dataframe: pd.DataFrame
    """The column `data.group_key`, if there is one."""
    reference: torch.Tensor | None = None
    """float64 [pairs, 2], log-probs of the rows under the reference; None if the loss has none, or before they are
    known."""

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> list[dict[str, Any]]:
        """Both rows for verl's collator, with the name of their group and, if known, the reference's log-prob."""
        group = f"prompt {self.group_of_pair[index]}"
        rows = [{**row_for_collator(*row), CONVERSATION: group} for row in self.pairs[index]]
        if self.reference is None:
            return rows
        return [{**row, REFERENCE: one} for row, one in zip(rows, self.reference[index], strict=True)]


def read_preferences(
    files: str | Sequence[str],
    tokenizer: Any,
    config: Mapping[str, Any],
    *,
    vocab_size: int,
    max_positions: int | None = None,
    max_samples: int = -1,
) -> PreferenceRows:
    """Read and tokenise all pairs.

    Args:
        files: paths of parquet files.
        tokenizer: the model's; token ids need none.
        config: verl's `data` node: max_length, truncation (error, right), apply_chat_template_kwargs, group_key.
        vocab_size: upper bound of ids, exclusive.
        max_positions: longest row that the model's positions cover; None for no limit.
        max_samples: number of pairs to keep from the start; -1 keeps all.

    Raises:
        InputError: a file cannot be read or lacks a column, or a pair cannot be trained; names file and pair.
    """
    read = _Reader(tokenizer, config, vocab_size, max_positions)
    pairs, prompts, others = list[Pair](), list[np.ndarray](), []
    columns_read, group_key = (PROMPT, *SIDES, TOOLS, SYSTEM_TEXT, *MASKS.values()), config.get("group_key", None)
    paths = [Path(files)] if isinstance(files, str) else list(map(Path, files))
    for path in paths:
        table, names = read_parquet(path, (*columns_read, group_key))
        if missing := [side for side in SIDES if side not in names]:
            raise RowFileError(
                f"{quoted_path(path)}: expected columns {CHOSEN} and {REJECTED}, missing {missing}; it has "
                f"{quoted_names(names)}"
            )
        if max_samples >= 0:
            table = table.slice(0, max_samples - len(pairs))
        columns = {name: _cells(table.column(name), name, path) for name in table.column_names if name in columns_read}
        others.append(table.drop_columns([name for name in columns if name != group_key]).to_pandas())
        for number in range(table.num_rows):
            try:
                pair, prompt = read.pair({name: cells[number] for name, cells in columns.items()})
            except RowFileError as error:
                raise RowFileError(f"{quoted_path(path)}: row {number}: {error}") from error
            pairs.append(pair)
            prompts.append(prompt)
    if not pairs:
        raise RowFileError(
            f"{', '.join(map(quoted_path, paths)) or 'no file'}: expected at least one pair, received none"
        )
    rows = PreferenceRows(
        pairs=pairs,
        group_of_pair=groups_of_prompts(prompts),
        dataframe=pd.concat(others, ignore_index=True),
    )
    by_key = group_rows(rows, group_key)
    return rows if by_key is None else replace(rows, group_of_pair=by_key)


def _cells(column: pyarrow.ChunkedArray, name: str, path: Path) -> list[Any]:
    """Values of a column; lists of integers as arrays, without a Python object per token."""
    try:
        if name in MASKS.values():
            return list(mark_lists(column, name))
        types, kind = pyarrow.types, column.type
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        if is_list and types.is_integer(kind.value_type):
            return list(token_id_lists(column, name))
    except RowFileError as error:
        raise RowFileError(f"{quoted_path(path)}: {error}") from error
    return [without_padding(value) for value in values_of(column, path)]


class _Reader:
    """Tokenises the cells of one pair."""

    def __init__(self, tokenizer: Any, config: Mapping[str, Any], vocab_size: int, max_positions: int | None) -> None:
        self._tokenizer, self._vocab_size, self._max_positions = tokenizer, vocab_size, max_positions
        self._max_length, self._truncation = int(config.get("max_length", 0) or 0), config.get("truncation", "error")
        if self._truncation not in ("error", "right"):
            raise RowFileError(f"data.truncation={self._truncation}: expected error or right, as pairs share a prompt")
        self._template_options = dict(config.get("apply_chat_template_kwargs", None) or {})
        self._form: TemplateForm | None = None

    def pair(self, cells: Mapping[str, Any]) -> tuple[Pair, np.ndarray]:
        """Both rows, and the prompt, int64 [tokens]."""
        for side in SIDES:
            if cells[side] is None or (isinstance(cells[side], Sized) and len(cells[side]) == 0):
                raise RowFileError(f"{side}: expected an answer, received nothing; drop the row")
        kinds = {_kind(cells[name]) for name in SIDES}
        if kinds == {MESSAGES} and _kind(cells.get(PROMPT)) == TEXT:
            # UltraFeedback's text beside messages that begin with it; TRL does not read it either.
            cells = {**cells, PROMPT: None}
        kinds |= {_kind(cells[PROMPT])} if cells.get(PROMPT) is not None else set()
        if len(kinds) > 1:
            raise RowFileError(f"expected one of {', '.join(KINDS)} in all columns, received {' and '.join(kinds)}")
        kind = kinds.pop()
        if kind != IDS and any(cells.get(mask) is not None for mask in MASKS.values()):
            raise RowFileError(
                f"{' and '.join(MASKS.values())} mark token ids, and this row has {kind}; drop the columns"
            )
        build = {IDS: self._from_token_ids, TEXT: self._from_texts, MESSAGES: self._from_messages}[kind]
        prompt_ids, rows = build(cells)
        if list(rows[0][0]) == list(rows[1][0]):
            raise RowFileError(
                f"{CHOSEN} and {REJECTED}: expected two answers, received {quoted(cells[CHOSEN])} twice; drop the row"
            )
        chosen, rejected = (self._checked(side, *row) for side, row in zip(SIDES, rows, strict=True))
        return (chosen, rejected), np.asarray(prompt_ids, dtype=np.int64)

    def _checked(self, side: str, token_ids: Sequence[int], loss_mask: Sequence[int]) -> IdsAndMask:
        ids, mask = np.asarray(token_ids, dtype=np.int64), np.asarray(loss_mask, dtype=np.int64)
        outside = (ids < 0) | (ids >= self._vocab_size)
        if outside.any():
            at = int(np.argmax(outside))
            raise RowFileError(f"{side}: expected ids in [0, {self._vocab_size}), received {ids[at]} at {at}")
        if self._max_length and len(ids) > self._max_length:
            if self._truncation == "error":
                raise RowFileError(
                    f"{side}: {len(ids)} tokens with the prompt exceed data.max_length={self._max_length}; raise it, "
                    "drop the row or set data.truncation=right"
                )
            ids, mask = ids[: self._max_length], mask[: self._max_length]
        if self._max_positions is not None and len(ids) > self._max_positions:
            raise RowFileError(
                f"{side}: {len(ids)} tokens with the prompt exceed the model's {self._max_positions} positions; "
                f"{SHORTER}"
            )
        if not mask.any() or mask[0]:
            raise RowFileError(f"{side}: expected a prompt and a trained token behind it; drop the row")
        return ids, mask

    def _from_token_ids(self, cells: Mapping[str, Any]) -> Any:
        prompt, sides = _prompt_and_sides(*(cells.get(name) for name in (PROMPT, *SIDES)))
        rows = []
        for name, side in zip(SIDES, sides, strict=True):
            mask = cells.get(MASKS[name])
            if mask is None:
                mask = np.ones(len(side))
            elif len(mask) != len(cells[name]):
                raise RowFileError(f"{MASKS[name]}: expected {len(cells[name])} entries, received {len(mask)}")
            # What both sides begin with is the prompt, whatever its mask says.
            rows.append(([*prompt, *side], [0] * len(prompt) + list(mask[len(mask) - len(side) :])))
        return prompt, rows

    def _from_texts(self, cells: Mapping[str, Any]) -> Any:
        prompt, sides = _prompt_and_sides(*(cells.get(name) for name in (PROMPT, *SIDES)))
        prompt_ids, end = self._tokenizer(prompt)["input_ids"], self._tokenizer.eos_token_id
        rows = []
        for side in sides:
            ids = self._tokenizer(side, add_special_tokens=False)["input_ids"] + ([] if end is None else [end])
            rows.append((prompt_ids + ids, [0] * len(prompt_ids) + [1] * len(ids)))
        return prompt_ids, rows

    def _from_messages(self, cells: Mapping[str, Any]) -> Any:
        """Rows in which the turns of the assistant behind the prompt are trained."""
        chats = {name: self._chat(name, cells) for name in (PROMPT, *SIDES) if cells.get(name) is not None}
        tools = next((chat.tools for chat in chats.values() if chat.tools), None)
        prompt, sides = _prompt_and_sides(
            *(chats[name].messages if name in chats else None for name in (PROMPT, *SIDES))
        )
        if system := cells.get(SYSTEM_TEXT):
            # It stands before the prompt, wherever that is, and not before answers.
            first = PROMPT if PROMPT in chats else CHOSEN
            begun = self._chat(first, cells, system=system).messages
            prompt = [*begun[: -len(chats[first].messages)], *prompt]

        def render(messages: Sequence[Any], **options: Any) -> list[int]:
            try:
                ids: list[int] = self._tokenizer.apply_chat_template(
                    list(messages), tools=tools, return_dict=False, **self._template_options, **options
                )
            except REFUSALS as error:
                raise RowFileError(f"its chat template refuses it: {escaped(str(error), 200)}; drop the row") from error
            return ids

        rows = []
        for name, side in zip(SIDES, sides, strict=True):
            messages = [*prompt, *side]
            ids = render(messages)
            mask = [0] * len(ids)
            for number in range(len(prompt), len(messages)):
                if messages[number]["role"] != ASSISTANT:
                    continue
                before, until = render(messages[:number], add_generation_prompt=True), render(messages[: number + 1])
                if ids[: len(until)] != until or until[: len(before)] != before:
                    raise RowFileError(
                        f"{name}, message {number - len(prompt)}: the chat template does not render it behind the "
                        "messages before it; set model.custom_chat_template to one that does, or give token ids"
                    )
                mask[len(before) : len(until)] = [1] * (len(until) - len(before))
            rows.append((ids, mask))
        return render(prompt, add_generation_prompt=True), rows

    def _chat(self, name: str, cells: Mapping[str, Any], *, system: Any = None) -> Chat:
        if self._form is None:
            self._form = form_of(self._tokenizer)
        chat = read_chat(cells[name], cells.get(TOOLS), self._form, name, system=system)
        if chat is None:
            raise RowFileError(f"{name}: expected messages, a text or token ids, received {quoted(cells[name])}")
        return chat


def _kind(cell: Any) -> str:
    if isinstance(cell, np.ndarray):
        return IDS
    return TEXT if isinstance(cell, str) and not holds_messages(cell) else MESSAGES


def _prompt_and_sides(prompt: Any, chosen: Any, rejected: Any) -> tuple[Any, list[Any]]:
    """The prompt and what follows it: without a prompt, what both sides begin with (less a last space, as in TRL)."""
    sides = [chosen, rejected]
    if prompt is not None and len(prompt) and all(list(side[: len(prompt)]) == list(prompt) for side in sides):
        if not isinstance(prompt, list) and len(prompt) >= SHORTEST_COPY:
            raise RowFileError(
                f"{PROMPT}: expected it once, received {quoted(prompt)} also at the beginning of {CHOSEN} and "
                f"{REJECTED}; drop the column {PROMPT}, or its copy in both"
            )
        if isinstance(prompt, list):  # messages, as in TRL
            prompt = None
    if prompt is None:
        shorter = min(map(len, sides))
        shared = next((at for at in range(shorter) if chosen[at] != rejected[at]), shorter)
        shared -= int(shared > 0 and isinstance(chosen, str) and chosen[shared - 1] == " ")
        prompt, sides = chosen[:shared], [side[shared:] for side in sides]
    if len(prompt) == 0:
        raise RowFileError(f"expected a {PROMPT}, or that {CHOSEN} and {REJECTED} begin with it")
    return prompt, sides
