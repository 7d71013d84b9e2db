"""The interface of agents that run against a gateway: an endpoint in, a reward out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tree_rl.rollout.gateway.endpoint import Endpoint

UNREPORTED: Mapping[str, Any] = {"states": ()}
"""Report to credit estimators of an agent that failed or was stopped, for `AgentResult.credit`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentResult:
    """What `Agent.run` returns."""

    reward: float
    """Reward of every row of the session."""
    status: str = "done"
    """One word for reports. `AgentInEnvironment` reports one of `in_environment.SCORED`."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the trainer's metrics. All sessions of an agent must report the same names."""
    credit: Mapping[str, Any] = field(default_factory=dict)
    """Report to credit estimators: fields of `tree_rl.credit.Leaf`, such as `states` and `step_rewards` with an entry
    for each call in the order of the answers."""


class Agent(Protocol):
    """Plays a session and rewards it itself. Each session builds one from the config's options.

    `AgentInEnvironment` is one: it runs a `TaskAgent`, which `Environment.score` rewards.
    """

    async def run(
        self, endpoint: Endpoint, *, messages: Sequence[Mapping[str, Any]], task: Mapping[str, Any]
    ) -> AgentResult:
        """Solve the task.

        Args:
            endpoint: the session's address and key; `endpoint.environment()` configures a command-line agent.
            messages: the prompt of the data set's row.
            task: the row's `extra_info`.

        An exception fails this session only. A cancelled run must clean up everything it started.
        """
