"""Which fields of a request are honoured, have no effect, or are refused; docs/request_fields.md says how and why.

Tests compare the tables with the SDKs and with that page.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tree_rl.rollout.gateway.protocols.fields import Fields, RequestError

SHOWN_NAME = 40
MANY_UNKNOWN = 20
"""Most unknown fields of one request that the session's record names."""

Effect = Literal["honoured", "no effect", "refused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldTreatment:
    """How the gateway treats a field."""

    effect: Effect
    note: str = ""
    """Message of the refusal."""
    neutral: tuple[Any, ...] = ()
    """Values of a refused field that are accepted, besides null, false, 0 and empty ones."""


def _refused(note: str, *neutral: Any) -> FieldTreatment:
    return FieldTreatment(effect="refused", note=note, neutral=neutral)


READ = FieldTreatment(effect="honoured")
NO_EFFECT = FieldTreatment(effect="no effect")
NOT_SUPPORTED = _refused("not supported by this gateway; leave it out")
_CONSTRAINT = _refused("the gateway constrains tokens only by response_format; leave it out")

CHAT_FIELDS: Mapping[str, FieldTreatment] = {
    **dict.fromkeys(("messages", "model", "max_completion_tokens", "max_tokens", "n", "stop", "stream"), READ),
    **dict.fromkeys(("stream_options", "tools", "tool_choice", "parallel_tool_calls", "response_format"), READ),
    **dict.fromkeys(("logprobs", "continue_final_message"), READ),
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"), READ),
    **dict.fromkeys(("repetition_penalty", "seed"), READ),
    **dict.fromkeys(("reasoning_effort", "verbosity", "chat_template_kwargs", "enable_thinking"), NO_EFFECT),
    **dict.fromkeys(("thinking", "reasoning", "user", "metadata", "safety_identifier"), NO_EFFECT),
    **dict.fromkeys(("service_tier", "store"), NO_EFFECT),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), NO_EFFECT),
    **dict.fromkeys(("logit_bias", "prediction", "audio", "moderation", "web_search_options"), NOT_SUPPORTED),
    "top_logprobs": _refused("expected 0: the model server reports only sampled tokens"),
    "modalities": _refused("expected only text", ["text"]),
    "functions": _refused("an older form of tools, which the gateway does not read; send tools"),
    "function_call": _refused("an older form of tool_choice, which the gateway does not read; send that", "auto"),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _CONSTRAINT),
    **dict.fromkeys(("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens"), _CONSTRAINT),
    **dict.fromkeys(("ignore_eos", "stop_token_ids"), _CONSTRAINT),
}
"""Fields of `POST /v1/chat/completions`: OpenAI's, and those of vLLM and other servers that clients send."""

MESSAGE_FIELDS: Mapping[str, FieldTreatment] = {
    **dict.fromkeys(("messages", "model", "max_tokens", "system", "stop_sequences", "stream", "tools"), READ),
    **dict.fromkeys(("tool_choice", "output_config", "output_format", "temperature", "top_p", "top_k"), READ),
    **dict.fromkeys(("thinking", "metadata", "user_profile_id", "workspace_id", "billing_policy"), NO_EFFECT),
    **dict.fromkeys(("fallback_credit_token", "service_tier", "inference_geo", "speed", "fallbacks"), NO_EFFECT),
    **dict.fromkeys(("cache_control", "diagnostics", "betas", "context_management"), NO_EFFECT),
    "compaction": _refused("the gateway edits no context; let the client compact it"),
    "thread": _refused("the gateway stores no conversations; send all messages"),
    **dict.fromkeys(("container", "mcp_servers"), NOT_SUPPORTED),
}
"""Fields of `POST /v1/messages`: Anthropic's, beta ones included."""


def check_fields(fields: Fields, known: Mapping[str, FieldTreatment]) -> tuple[str, ...]:
    """Refuse what the gateway cannot do, and return notes of unknown fields, which have no effect."""
    for name in fields.names():
        treatment, value = known.get(name), fields.raw(name)
        if treatment is not None and treatment.effect == "refused" and value and value not in treatment.neutral:
            raise RequestError(treatment.note, field=fields.name(name))
    unknown = [fields.name(name) for name in fields.names() if name not in known]
    return tuple(f"field {name[:SHOWN_NAME]}" for name in unknown[:MANY_UNKNOWN])
