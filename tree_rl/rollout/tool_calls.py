"""Reading an assistant turn in Qwen3's format: `<think>...</think>`, text, `<tool_call>{json}</tool_call>`."""

import json
import re
from dataclasses import dataclass

from tree_rl.rollout.environments.environment import ToolCall

THINK_END = "</think>"
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What an assistant turn says."""

    text: str
    """Without reasoning and tool calls, stripped."""
    calls: tuple[ToolCall | None, ...]
    """In the order written; None where one cannot be read."""


def parse_turn(content: str) -> Turn:
    """Read a turn.

    Args:
        content: the decoded response, special tokens of the format included, the end token not.

    Returns:
        Text and calls. Calls inside the reasoning do not count; an unfinished reasoning leaves nothing.
    """
    if THINK_END in content:
        content = content.rsplit(THINK_END, 1)[1]
    elif "<think>" in content:
        content = content.split("<think>", 1)[0]
    return Turn(text=CALL.sub("", content).strip(), calls=tuple(_parse_call(text) for text in CALL.findall(content)))


def _parse_call(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
    except json.JSONDecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return ToolCall(name=call["name"], arguments=arguments) if isinstance(arguments, dict) else None
