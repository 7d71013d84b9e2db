"""Hermes, Kimi K2, DeepSeek V3, Mistral and Llama 3: each call is a name and JSON arguments."""

import re
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from tree_rl.rollout.gateway.dialects.dialect import Reading, Tools, UnreadableCallError
from tree_rl.rollout.gateway.dialects.json_text import read_json, read_named, read_object, skip_space, unwrapped
from tree_rl.rollout.gateway.dialects.thinking import CallsBetweenTags, ThinkingDialect
from tree_rl.rollout.gateway.dialects.typed_text import is_offered
from tree_rl.rollout.gateway.protocols.messages import CalledTool

CALL_START, CALL_END = "<tool_call>", "</tool_call>"


class Hermes(CallsBetweenTags):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, also of Qwen 2.5 and 3."""

    name = "hermes"
    start = re.compile(CALL_START)
    end = CALL_END
    ends_reasoning = CALL_START

    def read_call(self, text: str, found: re.Match[str], tools: Tools) -> tuple[Sequence[CalledTool], int]:
        value, position = read_json(text, found.end())
        return [read_named(value, tools)], self.after(text, position, CALL_END)


class KimiK2(CallsBetweenTags):
    """`<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>JSON<|tool_call_end|>`, in a section."""

    name = "kimi_k2"
    start = re.compile(r"<\|tool_call_begin\|>\s*([^<]*)")
    end = "<|tool_call_end|>"
    wrappers = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    ends_reasoning = wrappers[0]
    _id = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
    _other_id = re.compile(r"functions[._:-]?(.+?)[._:-]?\d+")
    """Ids as clients and servers rewrite them, which the model then imitates: `functions_NAME_INDEX`."""

    def read_call(self, text: str, found: re.Match[str], tools: Tools) -> tuple[Sequence[CalledTool], int]:
        written = found[1].strip()
        named = self._id.fullmatch(written)
        position = self.after(text, found.end(), "<|tool_call_argument_begin|>")
        value, position = read_json(text, position)
        position = self.after(text, position, self.end)
        if named is None:
            raise UnreadableCallError("no_name")
        respelt = self._other_id.fullmatch(written)
        is_respelt = respelt and not is_offered(named[1], tools) and is_offered(respelt[1], tools)
        name = respelt[1] if respelt and is_respelt else named[1]
        return [CalledTool(name=name, arguments=read_object(value), written_id=written)], position

    def call_id(self, sent: str, *, name: str, index: int) -> str:
        """Templates write the id instead of the name."""
        return f"functions.{name}:{index}"


class DeepSeekV3(CallsBetweenTags):
    """`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>` from V3.1 on.

    V3 and R1 write `function<｜tool▁sep｜>NAME`, and the JSON in a block of Markdown.
    """

    name = "deepseek_v3"
    start = re.compile(r"<｜tool▁call▁begin｜>([^<]*)<｜tool▁sep｜>|<｜tool▁call▁begin｜>")
    end = "<｜tool▁call▁end｜>"
    wrappers = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    _in_markdown = re.compile(r"([^\n{]+)\n```(?:json)?\n")

    def read_call(self, text: str, found: re.Match[str], tools: Tools) -> tuple[Sequence[CalledTool], int]:
        if found[1] is None:
            raise UnreadableCallError("malformed")
        block = self._in_markdown.match(text, found.end())
        name = (found[1] if block is None else block[1]).strip()
        value, position = read_json(text, found.end() if block is None else block.end())
        if block is not None:
            position = self.after(text, position, "```")
        position = self.after(text, position, self.end)
        if not name:
            raise UnreadableCallError("no_name")
        return [CalledTool(name=name, arguments=read_object(value))], position


class Mistral(CallsBetweenTags):
    """`[TOOL_CALLS]NAME[ARGS]JSON` for each call, or without `[ARGS]`.

    Older models write `[TOOL_CALLS]` and a list of JSON objects.
    """

    name = "mistral"
    marks = ("[THINK]", "[/THINK]")
    reasoning_end = marks[1]
    start = re.compile(r"\[TOOL_CALLS\]\s*(?:(?P<name>[^\[\]{}\s]+)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\]|(?=\{)))?")
    ends_reasoning = "[TOOL_CALLS]"

    def read_call(self, text: str, found: re.Match[str], tools: Tools) -> tuple[Sequence[CalledTool], int]:
        value, position = read_json(text, found.end())
        if found["name"]:
            written = CalledTool(name=found["name"], arguments=read_object(value), written_id=found["id"])
            return [_with_fit_id(written)], position
        calls = value if isinstance(value, list) else [value]
        if not calls:
            raise UnreadableCallError("malformed")
        return [_with_fit_id(read_named(call, tools)) for call in calls], position

    def call_id(self, sent: str, *, name: str, index: int) -> str:
        """Templates only accept ids of nine letters and digits."""
        if _is_fit(sent):
            return sent
        return blake2b(sent.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()[:9]


def _is_fit(call_id: str) -> bool:
    return len(call_id) == 9 and call_id.isascii() and call_id.isalnum()


def _with_fit_id(call: CalledTool) -> CalledTool:
    """Drop the id that the model wrote if Mistral's templates would refuse it."""
    return call if call.written_id is None or _is_fit(call.written_id) else replace(call, written_id=None)


class Llama3(ThinkingDialect):
    """`{"name": NAME, "parameters": {...}}` as the whole turn; semicolons separate several calls."""

    name = "llama3"
    _call = re.compile(r'\{\s*"(?:type|name|function)"\s*:')
    _named = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"parameters"')
    _tag = "<|python_tag|>"
    _begin = re.compile(r"<\|python_tag\|>|(?:\A|</think>)\s*(?=\{)")

    def first_call(self, text: str, position: int) -> int:
        """The position of a tag, or of JSON at the start of the turn or directly after its reasoning."""
        found = self._begin.search(text, position)
        return len(text) if found is None else found.end()

    def shows_call(self, text: str) -> bool:
        return self._tag in text or self._call.search(text) is not None

    def read_calls(self, text: str, tools: Tools) -> Reading:
        """Read the calls of a text. JSON that is no call stays text."""
        around, tag, written = text.partition(self._tag)
        if not tag or self._call.match(text.lstrip()) is not None:  # a tag inside arguments is text
            around, tag, written = "", "", text
        if self.marks[0] in around or (not tag and self._call.match(written.lstrip()) is None):
            is_call = any(is_offered(found[1], tools) for found in self._named.finditer(text))
            return Reading(content=text, fault="malformed" if is_call else None)
        calls: list[CalledTool] = []
        position = 0
        while True:
            value, position = read_json(written, position)
            if not tag and not _is_call(value, tools):
                is_call = isinstance(value, dict) and is_offered(str(value.get("function")), tools)
                return Reading(content=text, fault="no_name" if is_call else None)
            calls.append(read_named(value, tools, keys=("parameters", "arguments")))
            position = skip_space(written, position)
            if position == len(written):
                return Reading(content=around, calls=tuple(calls))
            if written[position] != ";":
                raise UnreadableCallError("malformed")
            position += 1


def _is_call(value: object, tools: Tools) -> bool:
    """True if JSON has a name and arguments, or the name of a tool and any other key."""
    call = unwrapped(value)
    if not isinstance(call, dict) or "name" not in call:
        return False
    name, has_more = call["name"], bool(call.keys() - {"name", "id", "type"})
    return (
        "parameters" in call or "arguments" in call or (has_more and isinstance(name, str) and is_offered(name, tools))
    )
