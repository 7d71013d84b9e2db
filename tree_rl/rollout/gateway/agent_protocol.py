"""What runs against a gateway: any program that acts on a task through an endpoint and knows its reward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tree_rl.rollout.gateway.endpoint import Endpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentResult:
    """How an agent's session went."""

    reward: float
    """Given to every row of the session."""
    status: str = "done"
    """One word for reports: done, gave_up, timed_out, ..."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the trainer's metrics; every session of an agent reports the same names."""


class Agent(Protocol):
    """An agent. Built once per session from the options of the config."""

    async def run(
        self, endpoint: Endpoint, *, messages: Sequence[Mapping[str, Any]], task: Mapping[str, Any]
    ) -> AgentResult:
        """Act until done.

        Args:
            endpoint: the session's address and key; `endpoint.environment()` points a command-line agent to it.
            messages: the prompt of the data set's row.
            task: its `extra_info`.

        An exception fails this session and no other; a cancelled run must leave nothing behind.
        """
