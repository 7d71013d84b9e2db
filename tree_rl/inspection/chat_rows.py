"""Rows from conversations: one row per trajectory, or one row per model call. Legend: L tokens of a row."""

import json
from enum import StrEnum
from typing import Any

import numpy as np

from tree_rl.inspection.chat_tokenizer import ChatTokenizer
from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.columns import ColumnFile
from tree_rl.inspection.files.quoting import escaped, quoted
from tree_rl.inspection.messages.conversation import Chat, read_chat
from tree_rl.inspection.messages.roles import ASSISTANT, USER
from tree_rl.inspection.messages.template_form import REFUSALS
from tree_rl.inspection.row import Row
from tree_rl.inspection.turns import Turns

TOOLS, SYSTEM_TEXT = "tools", "system"
"""Columns that accompany conversations."""


class RowsPer(StrEnum):
    """What becomes one row."""

    TRIAL = "trial"
    """The whole conversation; every assistant turn is trained."""
    CALL = "call"
    """Each assistant turn with the messages before it; only that turn is trained."""


def read_chat_rows(
    file: ColumnFile, column: str, groups: list[str], tokenizer: ChatTokenizer, rows_per: RowsPer
) -> list[Row]:
    """Rows of a file of chat messages, in the order of its conversations; `column` is one of `CONVERSATIONS`.

    Raises:
        RowFileError: a cell that is not a list of messages, a message that the template refuses or that is not Unicode
            text, with `RowsPer.CALL` a conversation without an assistant turn.
    """
    rows = []
    columns = map(file.values, (column, TOOLS, SYSTEM_TEXT))
    for number, (cell, tools, system) in enumerate(zip(*columns, strict=True)):
        where = f"row {number}, column {column}"
        chat = read_chat(cell, tools, tokenizer.form, where, system=system)
        if chat is None:
            raise RowFileError(
                f"{where}: expected a list of messages with a role each, received {quoted(cell)}; correct or drop it"
            )
        for name, last, first_trained in _cuts(chat, f"row {number}", rows_per):
            try:
                ids, trained = _row(chat, first_trained, last, tokenizer, f"row {number}")
            except _NoPromptError:
                continue
            rows.append(Row(name=name, group=groups[number], token_ids=ids, trained=trained, record=number))
    if not rows:
        raise RowFileError(f"column {column}: expected a call that the chat template can ask for, found none")
    return rows


def read_call_rows(
    chat: Chat, answers: list[dict[str, Any]], record: int, group: str, tokenizer: ChatTokenizer
) -> list[Row]:
    """A row for each answer (one per choice) to the request `chat`; only the answer is trained."""
    rows = []
    last = len(chat.messages)
    for answer in answers:
        whole, name = Chat(messages=[*chat.messages, answer], tools=chat.tools), f"row {record}"
        ids, trained = _row(whole, last, last, tokenizer, name)
        rows.append(Row(name=name, group=group, token_ids=ids, trained=trained, record=record))
    return rows


class _NoPromptError(Exception):
    """The template refuses to prompt before the first question, so no model can have written this turn."""


def _row(
    chat: Chat, first_trained: int, last: int, tokenizer: ChatTokenizer, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, int64 [L], and a mask of those that the model wrote in messages first_trained..last, bool [L]."""
    messages = chat.messages[: last + 1]
    try:
        whole = tokenizer.render(messages, chat.tools)
    except REFUSALS as error:
        is_question = any(message["role"] == USER for message in messages)
        if not is_question and any(message["role"] == USER for message in chat.messages):
            raise _NoPromptError from error
        raise _refused(chat, last, tokenizer, name, error) from error
    _check_unicode(messages, whole, name)
    text, turns = tokenizer.encode(whole), Turns(chat, whole, last, tokenizer)
    trained = np.zeros(len(text.ids), dtype=bool)
    for index in range(first_trained, last + 1):
        # The first message is not an answer, whatever its role.
        if index and messages[index]["role"] == ASSISTANT:
            begin, end = turns.span(index)
            trained[text.token_at(begin) : text.token_at(end)] = True
    return text.ids, trained


def _refused(chat: Chat, last: int, tokenizer: ChatTokenizer, name: str, error: Exception) -> RowFileError:
    """The error that names the message after the longest beginning that the template accepts."""
    wrong = 0
    for count in range(last, 0, -1):
        try:
            tokenizer.render(chat.messages[:count], chat.tools)
        except REFUSALS:
            continue
        wrong = count
        break
    said = escaped(f"{type(error).__name__}: {error}", 160)
    return RowFileError(
        f"{name}, message {wrong}: the chat template refuses it: {said}; correct the message, or name the tokenizer of "
        "the model that it was written for"
    )


def _check_unicode(messages: list[dict[str, Any]], whole: str, name: str) -> None:
    """Refuse lone surrogates, which JSON can express but tokenizers cannot read."""
    if _is_unicode(whole):
        return
    at = next(
        (number for number, one in enumerate(messages) if not _is_unicode(json.dumps(one, ensure_ascii=False))), 0
    )
    raise RowFileError(f"{name}, message {at}: expected Unicode text, received a lone surrogate; drop it")


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _cuts(chat: Chat, name: str, rows_per: RowsPer) -> list[tuple[str, int, int]]:
    """(name, last message, first message that may be trained) of each row of a conversation."""
    if rows_per is RowsPer.TRIAL:
        return [(name, len(chat.messages) - 1, 0)]
    calls = [index for index, message in enumerate(chat.messages) if index and message["role"] == ASSISTANT]
    if not calls:
        raise RowFileError(f"{name}: expected an assistant message: --rows call makes one row of each")
    return [(f"{name}, call {call}", index, index) for call, index in enumerate(calls)]
