"""OpenAI's Responses API. Answers equal those that OpenAI's SDK serializes."""

from tree_rl.rollout.gateway.protocols.openai_chat import PING, error_body, model, models
from tree_rl.rollout.gateway.protocols.openai_responses.answers import answer, error_event, stream, token_count
from tree_rl.rollout.gateway.protocols.openai_responses.requests import (
    ResponsesRequest,
    read_count_request,
    read_request,
)
from tree_rl.rollout.gateway.protocols.openai_responses.store import PATH, ROUTES, Endpoint, StoredResponses

__all__ = [
    "PATH",
    "PING",
    "ROUTES",
    "Endpoint",
    "ResponsesRequest",
    "StoredResponses",
    "answer",
    "error_body",
    "error_event",
    "model",
    "models",
    "read_count_request",
    "read_request",
    "stream",
    "token_count",
]
