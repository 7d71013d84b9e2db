"""Converts tools of the Responses API to functions, the only kind in chat templates, and their calls back."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tree_rl.rollout.gateway.protocols.demands import NAMESPACE_MARK, Functions, described, seen_name
from tree_rl.rollout.gateway.protocols.fields import Fields, RequestError
from tree_rl.rollout.gateway.protocols.messages import CalledTool, read_arguments

CallKind = Literal["function_call", "custom_tool_call"]
UNASKED = ("web_search", "web_search_preview", "tool_search")
"""Types of tools that only OpenAI runs, but that Codex sends with every request and can work without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedTool:
    """A tool as the client knows it."""

    kind: CallKind
    name: str
    namespace: str | None = None


def read_tools(tools: Iterable[Fields], left_out: list[str]) -> tuple[Functions, Mapping[str, OfferedTool]]:
    """Read the field `tools`: functions for the model, and the client's tools by the name that the model sees.

    Refuses built-in tools by name, except those that clients send unasked: `left_out` gets their types.
    """
    functions: list[Mapping[str, Any]] = []
    offered: dict[str, OfferedTool] = {}

    def offer(fields: Fields, kind: CallKind, function: Mapping[str, Any], namespace: str | None) -> None:
        seen = f"{namespace}{NAMESPACE_MARK}{function['name']}" if namespace else function["name"]
        if seen in offered:
            raise RequestError(f"expected tools of different names, received {seen!r} twice", field=fields.name("name"))
        offered[seen] = OfferedTool(kind=kind, name=function["name"], namespace=namespace)
        functions.append({"type": "function", "function": {**function, "name": seen}})

    def read(fields: Fields, namespace: str | None) -> None:
        kind = fields.text("type")
        if kind == "function":
            offer(fields, "function_call", described(fields, fields.raw("parameters"), field="parameters"), namespace)
        elif kind == "custom":
            offer(fields, "custom_tool_call", _custom(fields), namespace)
        elif kind == "namespace" and namespace is None:
            for inner in fields.objects("tools", required=True):
                read(inner, fields.text("name"))
        elif kind.startswith(UNASKED):
            left_out.append(kind)
        else:
            raise RequestError(
                f"expected function, custom or namespace, received the built-in {kind!r}, which only OpenAI runs",
                field=fields.name("type"),
            )

    for tool in tools:
        read(tool, None)
    return tuple(functions), offered


def read_call(fields: Fields) -> CalledTool:
    """Read an item `function_call` or `custom_tool_call`."""
    if fields.raw("type") == "custom_tool_call":
        arguments: Mapping[str, Any] | str = {"input": fields.text("input")}
    else:
        arguments = read_arguments(fields.text("arguments", "{}") or "{}")
    return CalledTool(id=fields.text("call_id"), name=seen_name(fields), arguments=arguments)


def custom_input(call: CalledTool) -> str:
    """The input of a custom tool: its one argument, or all arguments as JSON if the model gave others."""
    arguments = call.arguments
    if isinstance(arguments, str) or list(arguments) != ["input"]:
        return call.arguments_json
    text = arguments["input"]
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)


def _custom(fields: Fields) -> dict[str, Any]:
    text = {"type": "string", "description": "The tool's whole input, as text."}
    if fields.raw("format") is not None:
        form = fields.child("format")
        if form.text("type") == "grammar":
            # The grammar is not enforced, only shown to the model.
            text["description"] += f" It follows this {form.text('syntax')} grammar:\n{form.text('definition')}"
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    return described(fields, parameters, field="format")
