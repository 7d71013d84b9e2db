"""Checks that a dialect reads a chat template's calls. The template shows the format that the model was trained on."""

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tree_rl.rollout.gateway.dialects.dialect import Dialect, Tools
from tree_rl.rollout.gateway.dialects.typed_text import name_of
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage

NAME, KEY, VALUE = "probe_tool", "probe_key", "probe value"
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {KEY: {"type": "string", "description": "A probe."}},
            "required": [KEY],
        },
    },
}
CALL_ID = "callprobe"
"""Nine letters, as Mistral's templates accept no other id."""
ASKED = ChatMessage(role="user", content="x")
_TAG = re.compile(r"<[^<>\s]+|\[[A-Z_]+\]")
_TOOL_TOKEN = re.compile(r"tool|function", re.IGNORECASE)

logger = logging.getLogger(__name__)

Render = Callable[..., str]
"""`Renderer.render`."""


def other_format(dialect: Dialect, render: Render, *, specials: Sequence[str]) -> Callable[[str, Tools], bool] | None:
    """If the dialect does not read the template's calls, a function that finds them in a turn, given its tools.

    Templates without tools are not checked.
    """
    opened = _rendered(render, [ASKED], tools=[TOOL], is_prompt=True)
    turn, is_open = _written_call(dialect, render, opened)
    if turn is not None and _reads(dialect, turn, specials, is_open=is_open):
        return None
    has_tools = opened is not None and NAME in opened
    if turn is None and not has_tools:
        return None
    logger.warning(
        "the chat template writes a tool call as %s, which dialect=%r does not read: agents get such calls as text, "
        "and drift.unread counts them as other_format; set gateway.dialect to the model's family or to an engine's "
        "parser (vllm:NAME, sglang:NAME)",
        "nothing" if turn is None else repr(turn),
        dialect.name,
    )
    marks = [token for token in specials if _TOOL_TOKEN.search(token)]
    if turn is None:
        return partial(_has_call, marks, None)
    before_name = turn[: turn.rfind(NAME, 0, turn.index(VALUE))]
    tag = (_TAG.findall(before_name) or [""])[-1]
    answer = _rendered(render, [ASKED, ChatMessage(role="assistant", content="y")], tools=[TOOL], is_prompt=False) or ""
    if tag and tag not in answer.removeprefix(opened or ""):
        return partial(_has_call, [*marks, tag], None)
    return partial(_has_call, marks, before_name.rpartition("\n")[2].lstrip() or None)


def _has_call(marks: Sequence[str], before: str | None, turn: str, tools: Tools) -> bool:
    """True if a turn has a mark, which occurs only in calls, or a tool's name after `before` (None: marks suffice)."""
    is_named = before is not None and any(before + name_of(tool) in turn for tool in tools)
    return bool(tools) and (is_named or any(mark in turn for mark in marks))


def _written_call(dialect: Dialect, render: Render, opened: str | None) -> tuple[str | None, bool]:
    """The template's turn with a call (None if it writes none), and True if the turn starts inside reasoning."""
    call = CalledTool(id=CALL_ID, name=NAME, arguments={KEY: VALUE})
    calling = ChatMessage(role="assistant", tool_calls=(call,))
    result = ChatMessage(role="tool", content="y", tool_call_id=CALL_ID, name=NAME)
    for messages in ([ASKED, calling], [ASKED, calling, result]):
        whole = _rendered(render, messages, tools=[TOOL], is_prompt=False)
        if whole is None:
            continue
        before = common_prefix(whole, opened or "")
        if before.rfind("<") > before.rfind(">"):  # two control tokens may start with the same characters
            before = before[: before.rfind("<")]
        if opened is None:
            before = whole[: whole.rfind(NAME, 0, whole.rfind(VALUE))]
        if VALUE in whole[len(before) :]:
            return whole[len(before) :], dialect.opens_reasoning(before)
    return None, False


def _reads(dialect: Dialect, turn: str, specials: Sequence[str], *, is_open: bool) -> bool:
    """True if the dialect reads the call of a turn that ends at one of the control tokens after its argument."""
    argument = turn.rindex(VALUE)
    ends = {at for token in specials for at in range(argument, len(turn)) if turn.startswith(token, at)}
    for end in sorted({*ends, len(turn)}):
        calls = dialect.read(turn[:end], tools=[TOOL], is_reasoning_open=is_open).calls
        if [(call.name, call.arguments) for call in calls] == [(NAME, {KEY: VALUE})]:
            return True
    return False


def common_prefix(one: str, other: str) -> str:
    """The text with which both texts start."""
    return one[: shared_length(one, other)]


def shared_length(one: str, other: str) -> int:
    """Length of the common prefix, by bisection: comparing slices is much faster than a loop."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _rendered(render: Render, messages: Sequence[ChatMessage], **options: Any) -> str | None:
    try:
        return render(messages, **options)
    except RequestError:
        return None
