"""Reads requests of the Responses API: which fields it reads, ignores and refuses."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tree_rl.rollout.gateway.protocols.demands import chosen_tools, read_json_format
from tree_rl.rollout.gateway.protocols.exchange import ChatRequest
from tree_rl.rollout.gateway.protocols.fields import Fields, RequestError, wrong
from tree_rl.rollout.gateway.protocols.messages import ChatMessage, Media
from tree_rl.rollout.gateway.protocols.openai_responses.items import Conversation, Remembered
from tree_rl.rollout.gateway.protocols.openai_responses.tools import OfferedTool, read_tools
from tree_rl.rollout.gateway.protocols.request_fields import (
    NO_EFFECT,
    NOT_SUPPORTED,
    READ,
    FieldTreatment,
    check_fields,
)

ECHOED: Mapping[str, Any] = {
    **dict.fromkeys(("background", "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id")),
    **dict.fromkeys(("prompt_cache_key", "safety_identifier", "service_tier", "temperature", "top_logprobs")),
    **dict.fromkeys(("top_p", "user")),
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}
"""Fields that an answer repeats from its request, and their values if the request lacks them."""
KNOWN: Mapping[str, FieldTreatment] = {
    **dict.fromkeys((*ECHOED, "include", "input", "model", "stream"), READ),
    # Fields of OpenAI's infrastructure.
    **dict.fromkeys(("access_programs", "background_options", "client_metadata", "image", "stream_options"), NO_EFFECT),
    **dict.fromkeys(("prompt_cache_options", "prompt_cache_retention"), NO_EFFECT),
    **dict.fromkeys(("context_management", "conversation", "moderation", "prompt"), NOT_SUPPORTED),
}
SAMPLING = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0)}
INCLUDABLE = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponsesRequest(ChatRequest):
    """A request of the Responses API."""

    response_id: str
    created: int
    """Unix time in seconds."""
    conversation: tuple[ChatMessage, ...]
    """The messages without `instructions`, which a later response does not inherit."""
    input_items: tuple[Mapping[str, Any], ...] = ()
    offered: Mapping[str, OfferedTool]
    """The client's tools by the name that the model sees."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    is_stored: bool = True
    is_background: bool = False
    with_summary: bool = False
    """True if the answer's summary contains the reasoning."""
    with_token: bool = False
    """True if the answer contains `encrypted_content`."""


def read_request(body: Any, remembered: Remembered) -> ResponsesRequest:
    """Read the body of `POST /v1/responses`."""
    fields = Fields(body)
    read = _content(fields, remembered)
    include = _include(fields)
    is_stored = fields.flag("store", default=True)
    is_background, is_stream = fields.flag("background"), fields.flag("stream")
    if is_background and (is_stream or not is_stored):
        raise RequestError("expected a stored response that is not streamed", field="background")
    return ResponsesRequest(
        **read,
        response_id=f"resp_{secrets.token_hex(24)}",
        created=int(time.time()),
        one_call=not fields.flag("parallel_tool_calls", default=True),
        json=read_json_format(fields.part("text"), "format"),
        max_tokens=fields.number("max_output_tokens", low=1),
        sampling=fields.numbers(SAMPLING),
        is_stream=is_stream,
        with_log_probs="message.output_text.logprobs" in include,
        with_reasoning_tokens=True,
        echo={key: default if body.get(key) is None else body[key] for key, default in ECHOED.items()},
        is_stored=is_stored,
        is_background=is_background,
        with_summary=fields.part("reasoning").text("summary", "") != "",
        with_token="reasoning.encrypted_content" in include,
    )


def read_count_request(body: Any, remembered: Remembered) -> ChatRequest:
    """Read the body of `POST /v1/responses/input_tokens`."""
    read = _content(Fields(body), remembered)
    return ChatRequest(**{key: read[key] for key in ("model", "messages", "tools", "images")})


def _content(fields: Fields, remembered: Remembered) -> dict[str, Any]:
    media = Media(check_fields(fields, KNOWN))
    if fields.text("truncation", "disabled") != "disabled":
        raise RequestError("expected disabled: the gateway drops no items", field="truncation")
    fields.number("top_logprobs", low=0, high=0)
    previous = fields.text("previous_response_id", "")
    history, images = remembered.conversation(previous) if previous else ((), {})
    media.images.update(images)
    sent = fields.raw("input")
    if isinstance(sent, str):
        sent = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": sent}]}]
        items = [Fields(sent[0], "input")]
    else:
        items = fields.objects("input", required=True)
    conversation = Conversation(history, remembered, media)
    for item in items:
        conversation.add(item)
    if not conversation.messages:
        raise wrong("input", "at least one item", sent)
    instructions = fields.text("instructions", "")
    system = [ChatMessage(role="system", content=instructions)] if instructions else []
    functions, offered = read_tools(fields.objects("tools"), media.left_out)
    tools, must_call = chosen_tools(fields, functions)
    return {
        "model": fields.text("model", "default"),
        "messages": (*system, *conversation.messages),
        "tools": tools,
        "must_call": must_call,
        "left_out": tuple(dict.fromkeys(media.left_out)),
        "images": media.images,
        "conversation": tuple(conversation.messages),
        "input_items": tuple(sent),
        "offered": offered,
    }


def _include(fields: Fields) -> Sequence[str]:
    include = fields.items("include")
    for name in include:
        if name not in INCLUDABLE:
            raise wrong("include", f"some of {', '.join(INCLUDABLE)}", name)
    return include
