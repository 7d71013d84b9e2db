"""Whether a dialect reads the calls that a chat template writes. A template shows what its model was trained on."""

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from tree_rl.rollout.gateway.dialects.dialect import Dialect
from tree_rl.rollout.gateway.dialects.other_format import OtherFormat
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
"""Nine letters: Mistral's templates take no other id."""
ASKED = ChatMessage(role="user", content="x")
_TAG = re.compile(r"<[^<>\s]+|\[[A-Z_]+\]")
_TOOL_TOKEN = re.compile(r"tool|function", re.IGNORECASE)

logger = logging.getLogger(__name__)

Render = Callable[..., str]
"""`Renderer.render`."""


def checked_dialect(dialect: Dialect, render: Render, *, specials: Sequence[str]) -> Dialect:
    """A dialect that reads the template's own call; else the same one, which then also counts the calls left as text.

    A template without tools shows no calls, and is not judged.

    Args:
        specials: the control tokens.
    """
    opened = _rendered(render, [ASKED], tools=[TOOL], is_prompt=True)
    turn, is_open = _written_call(dialect, render, opened)
    if turn is not None and _reads(dialect, turn, specials, is_open=is_open):
        return dialect
    has_tools = opened is not None and NAME in opened
    if turn is None and not has_tools:
        return dialect
    logger.warning(
        "the chat template writes a tool call as %s, which dialect=%r does not read: agents get such calls as text, "
        "and drift.unread counts them as other_format; set gateway.dialect to the model's family or to an engine's "
        "parser (vllm:NAME, sglang:NAME)",
        "nothing" if turn is None else repr(turn),
        dialect.name,
    )
    marks = [token for token in specials if _TOOL_TOKEN.search(token)]
    if turn is None:
        return OtherFormat(dialect, marks=marks, before_name=None)
    before_name = turn[: turn.rfind(NAME, 0, turn.index(VALUE))]
    tag = (_TAG.findall(before_name) or [""])[-1]
    answer = _rendered(render, [ASKED, ChatMessage(role="assistant", content="y")], tools=[TOOL], is_prompt=False) or ""
    if tag and tag not in answer.removeprefix(opened or ""):
        return OtherFormat(dialect, marks=[*marks, tag], before_name=None)
    return OtherFormat(dialect, marks=marks, before_name=before_name.rpartition("\n")[2].lstrip() or None)


def _written_call(dialect: Dialect, render: Render, opened: str | None) -> tuple[str | None, bool]:
    """A turn with a call as the template writes it, and whether it begins inside reasoning. None if it writes none."""
    call = CalledTool(id=CALL_ID, name=NAME, arguments={KEY: VALUE})
    calling = ChatMessage(role="assistant", tool_calls=(call,))
    result = ChatMessage(role="tool", content="y", tool_call_id=CALL_ID, name=NAME)
    for messages in ([ASKED, calling], [ASKED, calling, result]):
        whole = _rendered(render, messages, tools=[TOOL], is_prompt=False)
        if whole is None:
            continue
        alike = (index for index, pair in enumerate(zip(whole, opened or "", strict=False)) if pair[0] != pair[1])
        begun = whole[: next(alike, len(opened or ""))]
        if begun.rfind("<") > begun.rfind(">"):  # two control tokens may begin alike
            begun = begun[: begun.rfind("<")]
        if opened is None:
            begun = whole[: whole.rfind(NAME, 0, whole.rfind(VALUE))]
        if VALUE in whole[len(begun) :]:
            return whole[len(begun) :], dialect.opens_reasoning(begun)
    return None, False


def _reads(dialect: Dialect, turn: str, specials: Sequence[str], *, is_open: bool) -> bool:
    """Whether the dialect reads a turn that ends at one of the control tokens behind the call's argument."""
    behind = turn.rindex(VALUE)
    ends = {at for token in specials for at in range(behind, len(turn)) if turn.startswith(token, at)}
    for end in sorted({*ends, len(turn)}):
        calls = dialect.read(turn[:end], tools=[TOOL], is_reasoning_open=is_open).calls
        if [(call.name, dict(call.arguments)) for call in calls] == [(NAME, {KEY: VALUE})]:
            return True
    return False


def _rendered(render: Render, messages: Sequence[ChatMessage], **options: Any) -> str | None:
    try:
        return render(messages, **options)
    except RequestError:
        return None
