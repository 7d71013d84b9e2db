"""Rows from logs of model calls: each answer is a row, of which only the answer is trained.

OpenAI chat completions as {request, response}; LiteLLM's StandardLoggingPayload (messages, response); observations that
Langfuse exports (input, output, type GENERATION).
"""

from typing import Any

from tree_rl.inspection.chat_rows import SYSTEM_TEXT, TOOLS, read_call_rows
from tree_rl.inspection.chat_tokenizer import ChatTokenizer
from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.columns import ColumnFile
from tree_rl.inspection.files.quoting import quoted
from tree_rl.inspection.messages.conversation import holds_messages, read_chat
from tree_rl.inspection.messages.json_cells import decoded, decoded_list, is_nothing
from tree_rl.inspection.messages.roles import ASSISTANT, role_named
from tree_rl.inspection.row import Row

PAIRS = (("request", "response"), ("messages", "response"), ("input", "output"), ("prompt", "completion"))
KIND, GENERATION = "type", "GENERATION"
"""Langfuse's column for the kind of an observation; only generations ran a model."""
PARAMETERS = "model_parameters"
"""LiteLLM's column for the parameters of a call, its tools among them."""
ANSWERS = ("content", "tool_calls", "function_call", "parts")
WRAPPERS = ("response", "output", "outputs", "completion", "messages")
"""Fields of an object that may hold an answer."""
CALL_COLUMNS = {name for pair in PAIRS for name in pair} | {KIND, PARAMETERS}
"""All columns that `read_calls` reads, besides `TOOLS` and `SYSTEM_TEXT`."""


def call_pair(file: ColumnFile) -> tuple[str, str] | None:
    """The columns of requests and answers, if the file is a log of calls."""
    for pair in PAIRS:
        # verl's dumps of texts use the names of Langfuse's columns.
        if set(pair) <= set(file.columns) and any(
            isinstance(one, list | dict) or holds_messages(one) for one in file.values(pair[0])
        ):
            return pair
    return None


def read_calls(
    file: ColumnFile, pair: tuple[str, ...], groups: list[str], tokenizer: ChatTokenizer
) -> tuple[list[Row], int]:
    """One row per answer, and the number of records without one, which are skipped; `pair` is from `call_pair`.

    Raises:
        RowFileError: messages or an answer that cannot be read, or no answered call.
    """
    asked, answered = map(file.values, pair)
    kinds, *columns = map(file.values, (KIND, PARAMETERS, TOOLS, SYSTEM_TEXT))
    rows: list[Row] = []
    left_out = 0
    for number, (request, response) in enumerate(zip(asked, answered, strict=True)):
        answers = []
        if kinds[number] in (GENERATION, None):
            answers = _answers(response, tokenizer, f"row {number}, column {pair[1]}")
        left_out += not answers
        if answers:
            where, (parameters, tools, system) = f"row {number}, column {pair[0]}", (one[number] for one in columns)
            if is_nothing(tools):
                fields = decoded(parameters)
                tools = fields.get(TOOLS) if isinstance(fields, dict) else None
            chat = read_chat(request, tools, tokenizer.form, where, system=system)
            if chat is None:
                raise RowFileError(
                    f"{where}: expected chat messages with a role each, received {quoted(request)}; correct or drop it"
                )
            rows += read_call_rows(chat, answers, number, groups[number], tokenizer)
    if not rows:
        raise RowFileError(f"column {pair[1]}: expected an answered call, found none in {file.num_rows} records")
    return rows, left_out


def _answers(response: Any, tokenizer: ChatTokenizer, where: str) -> list[dict[str, Any]]:
    """The model's messages: one per choice, none if the call failed."""
    whole = decoded(response)
    if isinstance(response, str) and not _is_answer(whole):
        # The text is the model's answer, even if it is JSON.
        return [{"role": ASSISTANT, "content": response}] if response else []
    if not whole or (isinstance(whole, dict) and whole.get("error")):
        return []
    for name in WRAPPERS:
        inner = decoded(whole.get(name)) if isinstance(whole, dict) and not _is_answer(whole) else None
        whole = inner if isinstance(inner, list | dict) else whole
    choices = decoded_list(whole.get("choices", whole) if isinstance(whole, dict) else whole)
    if choices and all(isinstance(one, dict) for one in choices):
        messages = [decoded(one.get("message", one)) for one in choices]
        if all(isinstance(one, dict) and any(name in one for name in ANSWERS) for one in messages):
            given = [{name: value for name, value in one.items() if value is not None} for one in messages]
            chats = [read_chat([{"role": ASSISTANT, **one}], None, tokenizer.form, where) for one in given]
            return [chat.messages[-1] for chat in chats if chat is not None]
    raise RowFileError(
        f"{where}: expected choices with a message each, or a message, received {quoted(response)}; join the chunks of "
        "streamed answers, or drop the row"
    )


def _is_answer(value: Any) -> bool:
    """True if decoded JSON is an API's response object, False if it may be the model's text."""
    if isinstance(value, list):
        return bool(value) and all(_is_answer(decoded(one)) for one in value)
    if not isinstance(value, dict):
        return False
    role = value.get("role")
    is_said = isinstance(role, str) and role_named(role, "") == ASSISTANT
    return "choices" in value or "message" in value or (is_said and any(name in value for name in ANSWERS))
