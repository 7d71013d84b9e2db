"""The treatment of each field of a request. docs/request_fields.md shows it; tests compare the tables with the SDKs."""

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
    note: str
    """Its effect, why it has none, or the message of the refusal."""
    neutral: tuple[Any, ...] = ()
    """Values of a refused field that are accepted, besides null, false, 0 and empty ones."""


def _honoured(note: str) -> FieldTreatment:
    return FieldTreatment(effect="honoured", note=note)


def _no_effect(note: str) -> FieldTreatment:
    return FieldTreatment(effect="no effect", note=note)


def _refused(note: str, *neutral: Any) -> FieldTreatment:
    return FieldTreatment(effect="refused", note=note, neutral=neutral)


_SAMPLED = _honoured("with `sampling_from: agent`; otherwise the trainer's apply")
_TEMPLATE = _no_effect("the trainer's `template_options` decide")
_ACCOUNTING = _no_effect("accounting")
_CACHE = _no_effect("the model server caches every prefix")
_STORE = _no_effect("every call is recorded")
_ONE_MODEL = _no_effect("there is one model, at one speed and place")
_TOOLS = _honoured("offered to the model; `strict` has no effect")
_JSON = _honoured("as `json_output` says: refused, asked for, or enforced")
_CONSTRAINT = _refused("the gateway constrains tokens only by response_format; leave it out")
_CONSTRAINT_NAMES = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "allowed_token_ids"),
    *("bad_words", "min_tokens", "ignore_eos", "stop_token_ids"),
)
READ = _honoured("")
NO_EFFECT = _no_effect("")
NOT_SUPPORTED = _refused("not supported by this gateway; leave it out")

CHAT_FIELDS: Mapping[str, FieldTreatment] = {
    "messages": _honoured("models that read images see `data:` URLs; other media become a line of text"),
    "model": _honoured("comes back in the answer; every name is the same model"),
    "max_completion_tokens": _honoured("the gateway's own limits hold, too"),
    "max_tokens": _honoured("the older name"),
    "n": _honoured("up to 128 answers, siblings in the tree"),
    "stop": _honoured("up to 64 texts"),
    "stream": _honoured("a stream begins when its answer is complete"),
    "stream_options": _honoured("`include_usage`"),
    "tools": _TOOLS,
    "tool_choice": _honoured("see [forced calls](#forced-calls); `none` offers no tools"),
    "parallel_tool_calls": _honoured("false ends the turn after its first call"),
    "response_format": _JSON,
    "logprobs": _honoured("of the generated tokens"),
    "top_logprobs": _refused("expected 0: the model server reports only sampled tokens"),
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"), _SAMPLED),
    **dict.fromkeys(("repetition_penalty", "seed"), _SAMPLED),
    "continue_final_message": _honoured("continues a last assistant message"),
    **dict.fromkeys(("reasoning_effort", "verbosity", "chat_template_kwargs", "enable_thinking"), _TEMPLATE),
    **dict.fromkeys(("thinking", "reasoning"), _TEMPLATE),
    **dict.fromkeys(("user", "metadata", "safety_identifier"), _ACCOUNTING),
    "service_tier": _ONE_MODEL,
    "store": _STORE,
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), _CACHE),
    **dict.fromkeys(("logit_bias", "prediction", "audio"), NOT_SUPPORTED),
    "modalities": _refused("expected only text", ["text"]),
    **dict.fromkeys(("moderation", "web_search_options"), NOT_SUPPORTED),
    "functions": _refused("an older form of tools, which the gateway does not read; send tools"),
    "function_call": _refused("an older form of tool_choice, which the gateway does not read; send that", "auto"),
    **dict.fromkeys(_CONSTRAINT_NAMES, _CONSTRAINT),
}
"""Fields of `POST /v1/chat/completions`: OpenAI's, and those of vLLM and other servers that clients send."""

MESSAGE_FIELDS: Mapping[str, FieldTreatment] = {
    "messages": _honoured("a last assistant message is continued; documents without text become a line of text"),
    "model": _honoured("comes back in the answer; every name is the same model"),
    "max_tokens": _honoured("required; the gateway's own limits hold, too"),
    "system": _honoured("the first message"),
    "stop_sequences": _honoured("up to 64 texts"),
    "stream": _honoured("a stream begins when its answer is complete"),
    "tools": _TOOLS,
    "tool_choice": _honoured(
        "see [forced calls](#forced-calls); `disable_parallel_tool_use` ends the turn after its first call"
    ),
    "output_config": _honoured("`format` as `json_output` says; `effort` has no effect"),
    "output_format": _honoured("the older name of `output_config.format`"),
    **dict.fromkeys(("temperature", "top_p", "top_k"), _SAMPLED),
    "thinking": _TEMPLATE,
    **dict.fromkeys(("metadata", "user_profile_id", "workspace_id", "billing_policy"), _ACCOUNTING),
    "fallback_credit_token": _ACCOUNTING,
    **dict.fromkeys(("service_tier", "inference_geo", "speed", "fallbacks"), _ONE_MODEL),
    "cache_control": _CACHE,
    "diagnostics": _no_effect("answers carry no diagnostics"),
    "betas": _no_effect("it names versions of the API; their fields are listed here"),
    "context_management": _no_effect("the gateway edits nothing: the context is what the client sends"),
    "compaction": _refused("the gateway edits no context; let the client compact it"),
    "thread": _refused("the gateway stores no conversations; send all messages"),
    **dict.fromkeys(("container", "mcp_servers"), NOT_SUPPORTED),
}
"""Fields of `POST /v1/messages`: Anthropic's, beta ones included."""


def check_fields(fields: Fields, known: Mapping[str, FieldTreatment]) -> tuple[str, ...]:
    """Refuse what the gateway cannot do, and return notes of unknown fields, which have no effect.

    Raises:
        RequestError: a refused field has a value that is not neutral.
    """
    for name in fields.names():
        treatment, value = known.get(name), fields.raw(name)
        if treatment is not None and treatment.effect == "refused" and value and value not in treatment.neutral:
            raise RequestError(treatment.note, field=fields.name(name))
    unknown = [fields.name(name) for name in fields.names() if name not in known]
    return tuple(f"field {name[:SHOWN_NAME]}" for name in unknown[:MANY_UNKNOWN])
