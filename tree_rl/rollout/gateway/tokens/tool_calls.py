"""Tool calls in the format of Qwen and Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

import json
import re
from collections.abc import Mapping
from typing import Any

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def parse_tool_calls(text: str) -> tuple[str, list[tuple[str, Mapping[str, Any]]]] | None:
    """Read the tool calls of a turn.

    Args:
        text: the turn without its reasoning.

    Returns:
        The text around the calls, stripped, and (name, arguments) of each call in order. None if there is no call, or
        if one of them cannot be read.
    """
    calls = [_parse_call(written) for written in CALL.findall(text)]
    readable = [call for call in calls if call is not None]
    if not readable or len(readable) < len(calls):
        return None
    return CALL.sub("", text).strip(), readable


def _parse_call(written: str) -> tuple[str, Mapping[str, Any]] | None:
    try:
        call = json.loads(written)
    except json.JSONDecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return (call["name"], arguments) if isinstance(arguments, dict) else None
