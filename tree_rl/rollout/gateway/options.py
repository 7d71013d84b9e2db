"""The options of a gateway."""

from dataclasses import dataclass, field
from typing import Any, Literal

from tree_rl.option_types import check_fields
from tree_rl.rollout.gateway.calls.json_output import JsonOutput
from tree_rl.rollout.gateway.calls.side_calls import KNOWN_SIDE_CALLS, SideCall, read_side_calls
from tree_rl.rollout.gateway.dialects.families import check_dialect

OnDrift = Literal["reuse", "branch"]
Reasoning = Literal["field", "inline"]
SamplingFrom = Literal["trainer", "agent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayOptions:
    """Options of a gateway. Raises `ValueError` if a value is out of range; the message names it."""

    max_context_tokens: int
    """Limit of one call's prompt and response together. A longer prompt is refused with status 400."""
    max_turn_tokens: int
    """Limit of one call's generated tokens. An agent may ask for fewer."""
    on_drift: OnDrift = "reuse"
    """How a turn that an agent sends back enters the next prompt. `reuse` keeps the token ids that the model generated.
    `branch` tokenizes its text again, as a stock server does: the session branches where the ids differ."""
    reasoning: Reasoning = "field"
    """Where an agent finds reasoning: in a separate field or block, or inside the text."""
    sampling_from: SamplingFrom = "trainer"
    """Whose temperature, top_p and so on apply. With an agent's, samples do not follow the trained distribution."""
    json_output: JsonOutput = "refuse"
    """Treatment of a request for JSON (`response_format`, `output_config.format`). `refuse` answers with status 400.
    `instruct` adds the schema to the system text, and the model may still write something else. `enforce` makes the
    model server sample only JSON of the schema; log-probs are then those of the constrained distribution."""
    side_calls: tuple[SideCall, ...] = KNOWN_SIDE_CALLS
    """Kinds of side calls and their weights in training. As an option: a list of objects with the fields of `SideCall`.
    They come before the known kinds; one with a known name and no pattern changes the weight of that kind."""
    host: str = "127.0.0.1"
    """Address to listen on, at a free port. Only this machine reaches the default."""
    max_calls: int = 1000
    """Limit of calls of one session. Further calls are refused with status 403."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template (`enable_thinking`, ...)."""
    dialect: str = "auto"
    """Format of the model's tool calls: a family of `DIALECTS`, an engine's parser (`vllm:NAME`, `sglang:NAME`), or
    `auto`, the format of the chat template."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "side_calls", read_side_calls(self.side_calls))
        check_fields(self)
        check_dialect(self.dialect)
        for name in ("max_context_tokens", "max_turn_tokens", "max_calls"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
