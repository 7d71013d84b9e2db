"""Answers of Gemini's API, complete and streamed."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tree_rl.rollout.gateway.backend import BackendError
from tree_rl.rollout.gateway.protocols.exchange import Choice, Completion
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.gemini.requests import METHODS, GeminiRequest
from tree_rl.rollout.gateway.protocols.sealed_reasoning import seal

PING = b"\n\n"
"""White space, valid in an event stream and in a JSON list. Google's clients do not accept comments."""
ERROR_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}

Part = dict[str, Any]


def answer(request: GeminiRequest, completion: Completion) -> dict[str, Any]:
    candidates = [_candidate(index, _parts(request, choice), choice) for index, choice in enumerate(completion.choices)]
    return _body(request, completion, candidates, usage=_usage(completion))


def stream(request: GeminiRequest, completion: Completion) -> Iterator[bytes]:
    """The chunks of a streamed answer, as events or as a JSON list."""
    for number, chunk in enumerate(_chunks(request, completion)):
        yield _written(request, chunk, is_first=number == 0)
    yield b"" if request.as_events else b"]"


def token_count(num_tokens: int) -> dict[str, Any]:
    return {"totalTokens": num_tokens}


def error_body(error: RequestError | BackendError) -> dict[str, Any]:
    status = ERROR_STATUS.get(error.status, "FAILED_PRECONDITION" if error.status < 500 else "INTERNAL")
    return {"error": {"code": error.status, "message": str(error), "status": status}}


def error_event(request: GeminiRequest, error: RequestError | BackendError) -> bytes:
    written = _written(request, error_body(error), is_first=True)
    return written if request.as_events else written + b"]"


def models(name: str) -> dict[str, Any]:
    return {"models": [model(name)]}


def model(name: str) -> dict[str, Any]:
    methods = [*METHODS, "countTokens"]
    return {"name": f"models/{name}", "version": "1", "displayName": name, "supportedGenerationMethods": methods}


def _chunks(request: GeminiRequest, completion: Completion) -> Iterator[dict[str, Any]]:
    """Thoughts, text and calls of each candidate; its last chunk has the finish reason, the very last the usage."""
    last = len(completion.choices) - 1
    for index, choice in enumerate(completion.choices):
        parts = _parts(request, choice)
        calls = [part for part in parts if "functionCall" in part]
        pieces = [[part] for part in parts if "functionCall" not in part] + ([calls] if calls else [])
        for piece in pieces[:-1]:
            yield _body(request, completion, [_candidate(index, piece, None)])
        usage = _usage(completion) if index == last else None
        yield _body(request, completion, [_candidate(index, pieces[-1], choice)], usage=usage)


def _body(
    request: GeminiRequest,
    completion: Completion,
    candidates: list[dict[str, Any]],
    *,
    usage: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    body: dict[str, Any] = {"candidates": candidates}
    if usage is not None:
        body["usageMetadata"] = usage
    return {**body, "modelVersion": request.model, "responseId": completion.id}


def _candidate(index: int, parts: list[Part], choice: Choice | None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}}
    if choice is not None:
        candidate["finishReason"] = "MAX_TOKENS" if choice.stop_cause == "length" else "STOP"
    return {**candidate, "index": index}


def _parts(request: GeminiRequest, choice: Choice) -> list[Part]:
    message = choice.message
    parts: list[Part] = []
    if message.content or not message.tool_calls:
        parts.append({"text": message.content})
    parts += [{"functionCall": {"id": one.id, "args": one.arguments, "name": one.name}} for one in message.tool_calls]
    if message.reasoning:
        # The first part after the thoughts carries them for clients that drop thoughts.
        parts[0]["thoughtSignature"] = seal(message.reasoning)
        if request.with_thoughts:
            parts.insert(0, {"text": message.reasoning, "thought": True})
    return parts


def _usage(completion: Completion) -> dict[str, int]:
    prompt, generated = completion.prompt_tokens, completion.completion_tokens
    thoughts = sum(choice.reasoning_tokens or 0 for choice in completion.choices)
    counts = {"promptTokenCount": prompt, "candidatesTokenCount": generated - thoughts}
    if thoughts:
        counts["thoughtsTokenCount"] = thoughts
    return {**counts, "totalTokenCount": prompt + generated}


def _written(request: GeminiRequest, body: Mapping[str, Any], *, is_first: bool) -> bytes:
    data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    if request.as_events:
        return b"data: " + data + b"\n\n"
    return (b"[" if is_first else b",\n") + data
