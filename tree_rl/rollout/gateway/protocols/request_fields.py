"""The treatment of each field of a request, as docs/request_fields.md shows; tests compare the tables with the SDKs."""

from collections.abc import Mapping, Sequence
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
_CONSTRAINT = _refused("the gateway constrains tokens by response_format alone; leave it out")
_CONSTRAINT_NAMES = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
)
_NO_ENGINE = _refused("not supported by this gateway; leave it out")

CHAT_FIELDS: Mapping[str, FieldTreatment] = {
    "messages": _honoured("images, sound, videos and files become a line of text"),
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
    "top_logprobs": _refused("expected 0: the model server reports drawn tokens alone"),
    "temperature": _SAMPLED,
    "top_p": _SAMPLED,
    "top_k": _SAMPLED,
    "min_p": _SAMPLED,
    "presence_penalty": _SAMPLED,
    "frequency_penalty": _SAMPLED,
    "repetition_penalty": _SAMPLED,
    "seed": _SAMPLED,
    "continue_final_message": _honoured("continues a last assistant message"),
    "reasoning_effort": _TEMPLATE,
    "verbosity": _TEMPLATE,
    "chat_template_kwargs": _TEMPLATE,
    "enable_thinking": _TEMPLATE,
    "thinking": _TEMPLATE,
    "reasoning": _TEMPLATE,
    "user": _ACCOUNTING,
    "metadata": _ACCOUNTING,
    "safety_identifier": _ACCOUNTING,
    "service_tier": _ONE_MODEL,
    "store": _STORE,
    "prompt_cache_key": _CACHE,
    "prompt_cache_options": _CACHE,
    "prompt_cache_retention": _CACHE,
    "logit_bias": _NO_ENGINE,
    "prediction": _NO_ENGINE,
    "audio": _NO_ENGINE,
    "modalities": _refused("expected text alone", ["text"]),
    "moderation": _NO_ENGINE,
    "web_search_options": _NO_ENGINE,
    "functions": _refused("an older form of tools, which the gateway does not read; send tools"),
    "function_call": _refused("an older form of tool_choice, which the gateway does not read; send that", "auto"),
    **dict.fromkeys(_CONSTRAINT_NAMES, _CONSTRAINT),
}
"""Fields of `POST /v1/chat/completions`: OpenAI's, and those of vLLM and other servers that clients send."""

MESSAGE_FIELDS: Mapping[str, FieldTreatment] = {
    "messages": _honoured(
        "a last assistant message is continued; images and documents without text become a line of text"
    ),
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
    "temperature": _SAMPLED,
    "top_p": _SAMPLED,
    "top_k": _SAMPLED,
    "thinking": _TEMPLATE,
    "metadata": _ACCOUNTING,
    "user_profile_id": _ACCOUNTING,
    "workspace_id": _ACCOUNTING,
    "billing_policy": _ACCOUNTING,
    "fallback_credit_token": _ACCOUNTING,
    "service_tier": _ONE_MODEL,
    "inference_geo": _ONE_MODEL,
    "speed": _ONE_MODEL,
    "fallbacks": _ONE_MODEL,
    "cache_control": _CACHE,
    "diagnostics": _no_effect("answers carry no diagnostics"),
    "betas": _no_effect("it names versions of the API; their fields are listed here"),
    "context_management": _no_effect("the gateway edits nothing: the context is what the client sends"),
    "compaction": _refused("the gateway edits no context; let the client compact it"),
    "thread": _refused("the gateway holds no conversation; send its messages"),
    "container": _NO_ENGINE,
    "mcp_servers": _NO_ENGINE,
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
    return notes_of_unknown([name for name in fields.names() if name not in known])


def notes_of_unknown(names: Sequence[str]) -> tuple[str, ...]:
    """Notes of a request's unknown fields for the session's record."""
    return tuple(f"field {name[:SHOWN_NAME]}" for name in names[:MANY_UNKNOWN])
