"""What `json_output` makes of a request for JSON."""

import json
from dataclasses import replace
from typing import Literal

from tree_rl.rollout.gateway.protocols.exchange import ChatRequest
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.messages import ChatMessage

JsonOutput = Literal["refuse", "instruct", "enforce"]
"""Options of a gateway that is asked for JSON."""


def with_json(request: ChatRequest, json_output: JsonOutput) -> ChatRequest:
    """The request as it is answered: unchanged without a demand for JSON, or where the model server enforces it.

    Raises:
        RequestError: the gateway does not answer in JSON, or cannot enforce it on this request.
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
            "expected no tools beside it: an answer that is JSON from its first token on calls none "
            "(json_output: enforce)",
            field=request.json.field,
        )
    if request.continues_last:
        raise RequestError(
            "expected no beginning of the answer beside it (json_output: enforce)", field=request.json.field
        )
    return request


def _with_system_text(messages: tuple[ChatMessage, ...], text: str) -> tuple[ChatMessage, ...]:
    """In the first message, where it stays the same for all turns of a conversation."""
    if messages and messages[0].role == "system":
        first, *rest = messages
        return (replace(first, content=f"{first.content}\n\n{text}"), *rest)
    return (ChatMessage(role="system", content=text), *messages)
