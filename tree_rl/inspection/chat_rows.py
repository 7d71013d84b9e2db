"""Rows from conversations: one row per trajectory, or one row per model call.

Legend: M messages of a conversation, L tokens of a row.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import jinja2
import numpy as np

from tree_rl.inspection.chat_tokenizer import ChatTokenizer, EncodedText
from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.shown import escaped, shown
from tree_rl.inspection.row import Row

CONVERSATIONS = ("messages", "traj", "conversation", "conversations", "history")
TOOLS = "tools"
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}
"""ShareGPT's names of who speaks, and the roles of a chat template."""
REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)
"""What a template raises for messages that it does not expect: jinja passes on the errors of its expressions."""


class RowsPer(StrEnum):
    """What becomes one row."""

    TRIAL = "trial"
    """The whole conversation; trained is every assistant turn that the template renders as the model wrote it. Qwen3's
    drops the thoughts of turns before the last question, so only the turns behind it are."""
    CALL = "call"
    """Each assistant turn with the messages before it, that turn alone trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """The messages of one trajectory as text, cut at every message."""

    name: str
    """Its name in error messages."""
    text_through: list[str]
    """[M], text of the messages up to and including each."""
    text_asking: list[str]
    """[M], text that the model has read when it writes each assistant message; empty for the others."""


def read_chat_rows(
    column: str,
    cells: list[Any],
    tools: list[Any],
    groups: list[str],
    *,
    tokenizer: ChatTokenizer,
    rows_per: RowsPer,
) -> list[Row]:
    """Rows of a file of chat messages, conversations in order.

    Args:
        column: one of `CONVERSATIONS`.
        cells: its values, one conversation each.
        tools: function schemas of each conversation, None for none.
        groups: group of each conversation.
        tokenizer: renders and tokenises.
        rows_per: one row per conversation, or one per assistant turn.

    Raises:
        RowFileError: a cell that is not a list of messages, a message that the template refuses or that is no Unicode
            text, a conversation without an assistant turn when rows are calls.
    """
    rows = []
    for number, cell in enumerate(cells):
        conversation = _render(_messages(cell, number, column), tools[number], tokenizer, f"row {number}")
        for name, last, first_trained in _cuts(conversation, rows_per):
            text = tokenizer.encode(conversation.text_through[last])
            trained = _trained(conversation, first_trained, last, text)
            rows.append(Row(name=name, group=groups[number], token_ids=text.ids, trained=trained, record=number))
    return rows


def read_call_rows(
    messages: list[dict[str, Any]],
    answers: list[dict[str, Any]],
    tools: list[Any] | None,
    record: int,
    group: str,
    *,
    tokenizer: ChatTokenizer,
) -> list[Row]:
    """A row for each answer to one request, which alone is trained.

    Args:
        messages: of the request, at least one.
        answers: messages of the assistant, one for each choice.
        tools: function schemas of the request, None for none.
        record: of the file.
        group: of the record.
        tokenizer: renders and tokenises.

    Raises:
        RowFileError: a message that the template refuses or that is no Unicode text.
    """
    rows = []
    for answer in answers:
        conversation = _render([*messages, answer], tools, tokenizer, f"row {record}")
        last = len(messages)
        text = tokenizer.encode(conversation.text_through[last])
        trained = _trained(conversation, last, last, text)
        rows.append(Row(name=conversation.name, group=group, token_ids=text.ids, trained=trained, record=record))
    return rows


def _messages(cell: Any, number: int, column: str) -> list[dict[str, Any]]:
    if (
        isinstance(cell, list)
        and cell
        and all(isinstance(item, dict) and {"from", "value"} <= set(item) for item in cell)
    ):
        return [{"role": SHAREGPT_ROLES.get(item["from"], item["from"]), "content": item["value"]} for item in cell]
    if isinstance(cell, list) and cell and all(isinstance(item, dict) and "role" in item for item in cell):
        return cell
    raise RowFileError(
        f"row {number}, column {column}: expected a list of messages with a role each, received {shown(cell)}; correct "
        "or drop it"
    )


def _render(messages: list[dict[str, Any]], tools: Any, tokenizer: ChatTokenizer, name: str) -> Conversation:
    through, asking = [], []
    for count, message in enumerate(messages, start=1):
        try:
            through.append(tokenizer.render(messages[:count], tools))
            is_sampled = message["role"] == "assistant" and count > 1
            asking.append(tokenizer.render(messages[: count - 1], tools, ask=True) if is_sampled else "")
        except REFUSALS as error:
            said = escaped(f"{type(error).__name__}: {error}", 160)
            raise RowFileError(
                f"{name}, message {count - 1}: the chat template refuses it: {said}; correct the message, or name the "
                "tokenizer of the model that it was written for"
            ) from error
        if not _is_unicode(through[-1]):
            raise RowFileError(
                f"{name}, message {count - 1}: expected Unicode text, received a lone surrogate; drop it"
            )
    return Conversation(name=name, text_through=through, text_asking=asking)


def _is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogates, which JSON can spell and no tokenizer reads."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _cuts(conversation: Conversation, rows_per: RowsPer) -> list[tuple[str, int, int]]:
    """(name, last message, first message that may be trained) of each row of a conversation."""
    if rows_per is RowsPer.TRIAL:
        return [(conversation.name, len(conversation.text_through) - 1, 0)]
    calls = [index for index, text in enumerate(conversation.text_asking) if text]
    if not calls:
        raise RowFileError(f"{conversation.name}: expected an assistant message: --rows call makes one row of each")
    return [(f"{conversation.name}, call {call}", index, index) for call, index in enumerate(calls)]


def _trained(conversation: Conversation, first: int, last: int, text: EncodedText) -> np.ndarray:
    """bool [L], tokens that the model wrote in messages first..last."""
    whole = conversation.text_through[last]
    trained = np.zeros(len(text.ids), dtype=bool)
    for index in range(first, last + 1):
        if asked := conversation.text_asking[index]:
            begin = text.token_at(_shared_length(asked, whole))
            end = text.token_at(_shared_length(conversation.text_through[index], whole))
            trained[begin:end] = True
    return trained


def _shared_length(text: str, whole: str) -> int:
    """Characters of the longest common prefix, by bisection: comparing slices is much faster than a loop."""
    low, high = 0, min(len(text), len(whole))
    while low < high:
        middle = (low + high + 1) // 2
        if whole.startswith(text[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
