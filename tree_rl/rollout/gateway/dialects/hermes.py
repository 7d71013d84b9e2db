"""Hermes, and Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

import re
from collections.abc import Sequence

from tree_rl.rollout.gateway.dialects.dialect import Tools
from tree_rl.rollout.gateway.dialects.json_text import read_json, read_named
from tree_rl.rollout.gateway.dialects.thinking import CallsBetweenTags
from tree_rl.rollout.gateway.protocols.messages import CalledTool

CALL_START, CALL_END = "<tool_call>", "</tool_call>"


class Hermes(CallsBetweenTags):
    """Each call is a JSON object between two tags."""

    name = "hermes"
    start = re.compile(CALL_START)
    end = CALL_END
    ends_reasoning = CALL_START

    def read_call(self, text: str, found: re.Match[str], tools: Tools) -> tuple[Sequence[CalledTool], int]:
        value, end = read_json(text, found.end())
        end = self.after(text, end, CALL_END)
        return [read_named(value, tools)], end
