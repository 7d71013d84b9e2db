"""Tool calls in the format of Qwen and Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from collections.abc import Mapping
from typing import Any

from tree_rl.rollout.gateway.protocols.plain_json import JsonError, decode_json

CALL_START, CALL_END = "<tool_call>", "</tool_call>"


def parse_tool_calls(text: str) -> tuple[str, list[tuple[str, Mapping[str, Any]]]] | None:
    """Read the tool calls of a turn.

    Args:
        text: the turn without its reasoning.

    Returns:
        The text around the calls, stripped, and (name, arguments) of each call in order. None if there is no call, or
        if one of them cannot be read.
    """
    around, written = _take_out_calls(text)
    calls = [_parse_call(call) for call in written]
    readable = [call for call in calls if call is not None]
    if not readable or len(readable) < len(calls):
        return None
    return around.strip(), readable


def _take_out_calls(text: str) -> tuple[str, list[str]]:
    """The text around the calls, and what stands in each. A regular expression takes quadratic time for open calls."""
    around: list[str] = []
    calls: list[str] = []
    done = 0
    while (start := text.find(CALL_START, done)) >= 0 and (end := text.find(CALL_END, start)) >= 0:
        around.append(text[done:start])
        calls.append(text[start + len(CALL_START) : end])
        done = end + len(CALL_END)
    return "".join([*around, text[done:]]), calls


def _parse_call(written: str) -> tuple[str, Mapping[str, Any]] | None:
    try:
        call = decode_json(written)
    except JsonError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return (call["name"], arguments) if isinstance(arguments, dict) else None
