"""Uses tool parsers of vLLM and SGLang, for families that no dialect here reads.

Only an explicit name selects them, so that the installed engine does not change what an agent sees.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tree_rl.rollout.gateway.dialects.dialect import Dialect, Reading, Tools
from tree_rl.rollout.gateway.protocols.messages import CalledTool
from tree_rl.rollout.gateway.protocols.plain_json import JsonError, decode_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ENGINES = ("vllm", "sglang")
ANY_TOOL: Tools = ({"type": "function", "function": {"name": "any", "parameters": {"type": "object"}}},)
Extract = Callable[[str, Tools], tuple[str, list[tuple[str, str]]]]
"""(visible text, tools) -> the text around the calls, and the name and JSON arguments of each call."""


class EngineDialect(Dialect):
    """A dialect whose calls an engine's parser reads, and whose reasoning the template's dialect reads.

    Raises `ValueError` if the engine is not installed, or has no parser of this name.
    """

    def __init__(self, engine: str, parser: str, *, tokenizer: "PreTrainedTokenizerFast", reasoning: Dialect) -> None:
        self._extract = (_vllm if engine == "vllm" else _sglang)(parser, tokenizer)
        self._reasoning = reasoning
        self.name = f"{engine}:{parser}"
        self.marks, self.reasoning_end = reasoning.marks, reasoning.reasoning_end
        self.call_id = reasoning.call_id  # type: ignore[method-assign]

    def read(self, turn: str, *, tools: Tools, is_reasoning_open: bool) -> Reading:
        plain = self._reasoning.read(turn, tools=(), is_reasoning_open=is_reasoning_open)
        if not tools:
            return plain
        own = self._reasoning.read(turn, tools=tools, is_reasoning_open=is_reasoning_open)
        if own.fault == "in_reasoning" and own.calls and turn.startswith(own.marked_reasoning):
            content = turn[len(own.marked_reasoning) :]
            plain = replace(
                plain, content=content, reasoning=own.reasoning, marked_reasoning=own.marked_reasoning, fault=own.fault
            )
        try:
            around, calls = self._calls(plain.content, tools)
            if plain.reasoning and not plain.content.strip() and self._calls(plain.reasoning, tools)[1]:
                plain = replace(plain, fault="in_reasoning")
        except _FAILURES:
            return replace(plain, fault="refused")
        # Some parsers return {} for arguments under a key that they do not know.
        if any(mine.arguments and not theirs.arguments for mine, theirs in zip(own.calls, calls, strict=False)):
            return replace(plain, fault="refused")
        return replace(plain, content=around.strip(), calls=calls) if calls else plain

    def _calls(self, text: str, tools: Tools) -> tuple[str, tuple[CalledTool, ...]]:
        around, found = self._extract(text, tools)
        return around, tuple(CalledTool(name=name, arguments=_object(written)) for name, written in found)


_FAILURES = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RecursionError, TypeError, ValueError)
"""Errors that parsers raise for turns that they do not expect."""


def _object(written: str) -> dict[str, Any]:
    arguments = decode_json(written or "{}")
    if not isinstance(arguments, dict):
        raise JsonError("expected a JSON object")
    return arguments


def _vllm(name: str, tokenizer: "PreTrainedTokenizerFast") -> Extract:
    parsers = _module("vllm.tool_parsers", "vllm", name)
    # The type moves between versions of vLLM; the module of the parsers' base class always imports it.
    request_type = _module("vllm.tool_parsers.abstract_tool_parser", "vllm", name).ChatCompletionRequest
    try:
        parser = parsers.ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        raise ValueError(f"dialect='vllm:{name}': this vLLM has no such tool parser") from error

    def extract(text: str, tools: Tools) -> tuple[str, list[tuple[str, str]]]:
        request = request_type(model="policy", messages=[], tools=[dict(tool) for tool in tools])
        found = parser(tokenizer, request.tools).extract_tool_calls(text, request)
        if not found.tools_called:
            return text, []
        return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]

    try:
        extract("", ANY_TOOL)
    except RuntimeError as error:
        # vLLM's parser for Harmony reads no text, and others need control tokens that the tokenizer lacks.
        raise ValueError(f"dialect='vllm:{name}': this parser cannot read this model's turns ({error})") from error
    return extract


def _sglang(name: str, tokenizer: "PreTrainedTokenizerFast") -> Extract:
    parser = _module("sglang.srt.function_call.function_call_parser", "sglang", name).FunctionCallParser
    tool_type = _module("sglang.srt.entrypoints.openai.protocol", "sglang", name).Tool
    if name not in parser.ToolCallParserEnum:
        raise ValueError(f"dialect='sglang:{name}': expected one of {', '.join(sorted(parser.ToolCallParserEnum))}")

    def extract(text: str, tools: Tools) -> tuple[str, list[tuple[str, str]]]:
        offered = [tool_type(**tool) for tool in tools]
        around, found = parser(offered, name).parse_non_stream(text)
        return around, [(call.name, call.parameters) for call in found]

    return extract


def _module(path: str, engine: str, name: str) -> Any:
    try:
        return importlib.import_module(path)
    except ImportError as error:
        raise ValueError(f"dialect='{engine}:{name}': {engine} cannot be imported here ({error})") from error
