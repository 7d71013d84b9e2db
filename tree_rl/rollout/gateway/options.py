"""The options of a gateway."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tree_rl.rollout.gateway.calls.json_output import JsonOutput
from tree_rl.rollout.gateway.calls.side_calls import KNOWN_SIDE_CALLS, SideCall, read_side_calls
from tree_rl.rollout.gateway.dialects.families import check_dialect

OnDrift = Literal["reuse", "branch"]
Reasoning = Literal["field", "inline"]
SamplingFrom = Literal["trainer", "agent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayOptions:
    """How a gateway serves and records.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    max_context_tokens: int
    """Limit of prompt and response of one call. A longer prompt is refused with status 400."""
    max_turn_tokens: int
    """Limit of generated tokens of one call. An agent may ask for fewer."""
    on_drift: OnDrift = "reuse"
    """What becomes of a turn that an agent sends back. `reuse` continues the ids that the model generated. `branch`
    tokenizes its text anew, as a stock server does: the session branches where the ids differ."""
    reasoning: Reasoning = "field"
    """`field`: agents find reasoning in a field or block of its own. `inline`: inside the text."""
    sampling_from: SamplingFrom = "trainer"
    """Whose temperature, top_p and so on apply. An `agent`'s leave the distribution that `trainer` trains."""
    json_output: JsonOutput = "refuse"
    """What becomes of a request for JSON (`response_format`, `output_config.format`). `refuse` answers with status 400.
    `instruct` writes the schema into the system text, and the model may still write something else. `enforce` lets the
    model server draw nothing but JSON of the schema; log-probs are then those of the constrained draw."""
    side_calls: tuple[SideCall, ...] = KNOWN_SIDE_CALLS
    """Calls beside the task, and their weight in training. Yours come before the known ones; one with the name of a
    known one and no pattern changes its weight."""
    host: str = "127.0.0.1"
    """Address to listen on. Only this machine reaches the default. The port is a free one."""
    max_calls: int = 1000
    """Calls of one session. Further ones are refused with status 403."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Passed to the chat template (`enable_thinking`, ...)."""
    dialect: str = "auto"
    """How the model writes tool calls: a family of `DIALECTS`, an engine's parser (`vllm:NAME`, `sglang:NAME`), or
    `auto`, what the chat template shows."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "side_calls", read_side_calls(self.side_calls))
        choices = (
            ("on_drift", OnDrift),
            ("reasoning", Reasoning),
            ("sampling_from", SamplingFrom),
            ("json_output", JsonOutput),
        )
        for name, allowed in choices:
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(get_args(allowed))}")
        check_dialect(self.dialect)
        for name in ("max_context_tokens", "max_turn_tokens", "max_calls"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
