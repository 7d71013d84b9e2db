"""Qwen3-Coder, Qwen 3.5 and GLM-4: each argument is plain text between its own tags.

A value may contain tags, so it ends at the first closing tag that is followed by valid markup.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tree_rl.rollout.gateway.dialects.dialect import Tools, UnreadableCallError
from tree_rl.rollout.gateway.dialects.json_arguments import CALL_END, CALL_START
from tree_rl.rollout.gateway.dialects.json_text import skip_space
from tree_rl.rollout.gateway.dialects.thinking import CallsBetweenTags
from tree_rl.rollout.gateway.dialects.typed_text import parameters_of, typed
from tree_rl.rollout.gateway.protocols.messages import CalledTool


def _beginnings(mark: str) -> str:
    """A pattern for every prefix of a mark, including the empty one."""
    return "".join(f"(?:{re.escape(one)}" for one in mark[:-1]) + ")?" * (len(mark) - 1)


def _arguments(
    text: str, position: int, key: re.Pattern[str], value_end: re.Pattern[str], schemas: Mapping[str, Any]
) -> tuple[dict[str, Any], int]:
    """Read arguments up to the first text that is no key; return them and their end."""
    arguments: dict[str, Any] = {}
    position = skip_space(text, position)
    while (found := key.match(text, position)) is not None:
        closing = value_end.search(text, found.end())
        if closing is None:
            raise UnreadableCallError("unclosed")
        name = found[1].strip()
        arguments[name] = typed(text[found.end() : closing.start()], schemas.get(name))
        position = skip_space(text, closing.end())
    return arguments, position


class Qwen3Coder(CallsBetweenTags):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

    name = "qwen3_coder"
    # The models sometimes omit `<tool_call>`.
    start = re.compile(rf"{CALL_START}\s*(?:<function=(?P<name>[^>\n]+)>)?|<function=(?P<bare>[^>\n]+)>")
    end = "</function>"
    ends_reasoning = CALL_START
    _parameter = re.compile(r"<parameter=([^>\n]+)>\n?")
    # The models also omit the last `</tool_call>`, or the one before the next call.
    _call_end = re.compile(rf"\s*(?:{CALL_END}|(?={CALL_START})|{_beginnings(CALL_END)}\Z)")
    _value_end = re.compile(rf"\n?</parameter>(?=\s*(?:<parameter=|</function>{_call_end.pattern}))")
    _bare_value_end = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))")

    def read_call(self, text: str, found: re.Match[str], tools: Tools) -> tuple[Sequence[CalledTool], int]:
        name = found["name"] or found["bare"]
        if name is None:
            raise UnreadableCallError("malformed")
        value_end = self._bare_value_end if found["bare"] else self._value_end
        arguments, position = _arguments(text, found.end(), self._parameter, value_end, parameters_of(name, tools))
        position = self.after(text, position, "</function>")
        if found["name"]:
            closed = self._call_end.match(text, position)
            if closed is None:
                raise UnreadableCallError("malformed")
            position = closed.end()
        return [CalledTool(name=name, arguments=arguments)], position


class Glm4(CallsBetweenTags):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

    name = "glm4"
    start = re.compile(rf"{CALL_START}\s*([^<\n]*)")
    end = CALL_END
    ends_reasoning = CALL_START
    _key = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
    _value_end = re.compile(rf"</arg_value>(?=\s*(?:<arg_key>|{CALL_END}))")

    def read_call(self, text: str, found: re.Match[str], tools: Tools) -> tuple[Sequence[CalledTool], int]:
        name = found[1].strip()
        if not name:
            raise UnreadableCallError("no_name")
        arguments, position = _arguments(text, found.end(), self._key, self._value_end, parameters_of(name, tools))
        return [CalledTool(name=name, arguments=arguments)], self.after(text, position, CALL_END)
