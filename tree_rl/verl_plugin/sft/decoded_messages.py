"""Normalises the conversations of verl's SFT dataset."""

from collections.abc import Callable
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.quoting import quoted
from tree_rl.inspection.messages.conversation import read_chat
from tree_rl.inspection.messages.json_cells import without_padding
from tree_rl.inspection.messages.roles import ASSISTANT
from tree_rl.inspection.messages.template_form import TemplateForm


def decode_messages(dataset: Any, data: DictConfig, *, key: str, place: Callable[[int], str]) -> None:
    """Normalise messages and tools of verl's dataset in place: JSON text, other names of roles, parts, null padding.

    `key` names the files in `data`, and `place` describes a row. Raises a RowFileError, which names a row that cannot
    be read, or if no row has a turn of the assistant.
    """
    form, chats = form_of(dataset.tokenizer), []
    offered = dataset.tools or [None] * len(dataset.messages)
    for row, (cell, tools) in enumerate(zip(dataset.messages, offered, strict=True)):
        where = f"data.{key}: {place(row)}, column {quoted(data.messages_key)}"
        chat = read_chat(without_padding(cell), without_padding(tools), form, where)
        if chat is None:
            raise RowFileError(f"{where}: expected a list of messages with a role each, received {quoted(cell)}")
        chats.append(chat)
    if chats and not any(message["role"] == ASSISTANT for chat in chats for message in chat.messages):
        raise RowFileError(f"data.{key}: expected a message of the assistant, received none; nothing would train")
    dataset.messages = [chat.messages for chat in chats]
    dataset.tools = [chat.tools for chat in chats] if any(chat.tools for chat in chats) else None
    column = pd.Series(dataset.messages, index=dataset.dataframe.index, dtype=object)
    dataset.dataframe = dataset.dataframe.assign(**{dataset.messages_key: column})


def form_of(tokenizer: Any) -> TemplateForm:
    """The form of messages that a tokenizer's chat template expects."""
    template = tokenizer.chat_template
    return TemplateForm.of(
        template if isinstance(template, str) else "",
        lambda messages: str(tokenizer.apply_chat_template(list(messages), tokenize=False)),
    )
