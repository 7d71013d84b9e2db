"""Gemini's API: `generateContent`, `streamGenerateContent` and `countTokens`."""

from tree_rl.rollout.gateway.protocols.gemini.answers import (
    PING,
    answer,
    error_body,
    error_event,
    model,
    models,
    stream,
    token_count,
)
from tree_rl.rollout.gateway.protocols.gemini.requests import (
    METHODS,
    GeminiRequest,
    key_of,
    read_count_request,
    read_request,
    speaks_gemini,
)

__all__ = [
    "METHODS",
    "PING",
    "GeminiRequest",
    "answer",
    "error_body",
    "error_event",
    "key_of",
    "model",
    "models",
    "read_count_request",
    "read_request",
    "speaks_gemini",
    "stream",
    "token_count",
]
