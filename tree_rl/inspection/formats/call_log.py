"""Rows from logs of model calls: each call is a row, its answer alone is trained.

OpenAI chat completions as {request, response}; LiteLLM's StandardLoggingPayload (messages, response); observations that
Langfuse exports (input, output, type GENERATION).
"""

from collections.abc import Callable
from typing import Any

from tree_rl.inspection.chat_rows import read_call_rows
from tree_rl.inspection.chat_tokenizer import ChatTokenizer
from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.columns import ColumnFile
from tree_rl.inspection.files.shown import shown
from tree_rl.inspection.row import Row

PAIRS = (("request", "response"), ("messages", "response"), ("input", "output"))
KIND, GENERATION = "type", "GENERATION"
"""Langfuse's column of what an observation is; others than generations ran no model."""
PARAMETERS = "model_parameters"
"""LiteLLM's column of what a call asked for beside its messages."""
CALL_COLUMNS = {name for pair in PAIRS for name in pair} | {KIND, PARAMETERS}
"""All that `read_calls` reads."""


def call_pair(file: ColumnFile) -> tuple[str, str] | None:
    """The columns of what was asked and what was answered, if the file is a log of calls."""
    for pair in PAIRS:
        # verl's dumps of texts have the names of Langfuse's columns.
        if set(pair) <= set(file.columns) and any(isinstance(one, list | dict) for one in file.values(pair[0])):
            return pair
    return None


def read_calls(
    file: ColumnFile, pair: tuple[str, str], groups: list[str], tokenizer: ChatTokenizer
) -> tuple[list[Row], int]:
    """One row per answer, and how many records are no answered calls, which are left out.

    Args:
        file: holds the columns.
        pair: of `call_pair`.
        groups: group of each record.
        tokenizer: renders and tokenises.

    Raises:
        RowFileError: messages or an answer that cannot be read, or no answered call.
    """
    asked, answered = map(file.values, pair)
    kinds = file.values(KIND) if KIND in file.columns else [GENERATION] * file.num_rows
    parameters = file.values(PARAMETERS) if PARAMETERS in file.columns else [None] * file.num_rows
    rows: list[Row] = []
    left_out = 0
    for number, (request, response) in enumerate(zip(asked, answered, strict=True)):
        answers = [] if kinds[number] not in (GENERATION, None) else _answers(response, number, pair[1])
        left_out += not answers
        if answers:
            messages, tools = _asked(request, number, pair[0])
            tools = tools or _tools_of(parameters[number])
            rows += read_call_rows(messages, answers, tools, number, groups[number], tokenizer=tokenizer)
    if not rows:
        raise RowFileError(f"column {pair[1]}: expected an answered call, found none in {file.num_rows} records")
    return rows, left_out


def _asked(request: Any, number: int, column: str) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Messages and tools of a request, or of its messages alone."""
    messages = request.get("messages") if isinstance(request, dict) else request
    if isinstance(messages, list) and messages and all(isinstance(one, dict) and "role" in one for one in messages):
        return [_plain(one) for one in messages], _tools_of(request)
    raise RowFileError(
        f"row {number}, column {column}: expected chat messages with a role each, received {shown(request)}; correct "
        "or drop it"
    )


def _answers(response: Any, number: int, column: str) -> list[dict[str, Any]]:
    """Messages that the model wrote: one a choice, none where the call failed."""
    if not response or (isinstance(response, dict) and response.get("error")):
        return []
    if isinstance(response, str):
        return [{"role": "assistant", "content": response}]
    choices = response.get("choices", [response]) if isinstance(response, dict) else response
    if isinstance(choices, list) and all(isinstance(one, dict) for one in choices):
        messages = [one.get("message", one) for one in choices]
        if all(isinstance(one, dict) and ("content" in one or "tool_calls" in one) for one in messages):
            return [{"role": "assistant", **_plain(one)} for one in messages]
    raise RowFileError(
        f"row {number}, column {column}: expected choices with a message each, or a message, received "
        f"{shown(response)}; join the chunks of streamed answers, or drop the row"
    )


def _tools_of(fields: Any) -> list[Any] | None:
    tools = fields.get("tools") if isinstance(fields, dict) else None
    return tools if isinstance(tools, list) else None


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Without the fields that are null; content in parts of text becomes one text, which all templates take."""
    content = message.get("content")
    kept = {name: value for name, value in message.items() if value is not None}
    is_text: Callable[[Any], bool] = lambda part: isinstance(part, dict) and isinstance(part.get("text"), str)  # noqa: E731
    if isinstance(content, list) and content and all(map(is_text, content)):
        kept["content"] = "".join(part["text"] for part in content)
    return {"content": "", **kept}
