"""Applies the option `json_output` to a request for JSON."""

import json
from dataclasses import replace
from typing import Literal

from tree_rl.rollout.gateway.protocols.exchange import ChatRequest
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.messages import ChatMessage

JsonOutput = Literal["refuse", "instruct", "enforce"]
"""What a gateway does with a request for JSON; see `GatewayOptions.json_output`."""


def with_json(request: ChatRequest, json_output: JsonOutput) -> ChatRequest:
    """Return the request to answer: with a system text for `instruct`, otherwise unchanged.

    Raises `RequestError` if the gateway refuses requests for JSON, or cannot enforce it on this request.
    """
    if request.json is None:
        return request
    if json_output == "refuse":
        raise RequestError(
            "expected text: this gateway forces no format (its option json_output is refuse; instruct asks the model "
            "for JSON, enforce constrains it)",
            field=request.json.field,
        )
    if json_output == "instruct":
        schema = json.dumps(request.json.schema, ensure_ascii=False, sort_keys=True)
        text = f"Answer with JSON alone, without any other text. It must satisfy this JSON schema: {schema}"
        return replace(request, json=None, messages=_with_system_text(request.messages, text))
    if request.tools:
        raise RequestError(
            "expected no tools: an answer that is JSON from its first token makes no calls (json_output: enforce)",
            field=request.json.field,
        )
    if request.continues_last:
        raise RequestError(
            "expected no last assistant message to continue (json_output: enforce)", field=request.json.field
        )
    return request


def _with_system_text(messages: tuple[ChatMessage, ...], text: str) -> tuple[ChatMessage, ...]:
    """Add a text to the first message, so that all turns of a conversation share the prefix."""
    if messages and messages[0].role == "system":
        first, *rest = messages
        return (replace(first, content=f"{first.content}\n\n{text}"), *rest)
    return (ChatMessage(role="system", content=text), *messages)
