"""The interface of agents that work in an environment and call the model at an endpoint."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tree_rl.rollout.environments.environment import Environment, Outcome
from tree_rl.rollout.gateway.endpoint import CALL_TIMEOUT_S, Endpoint

CLIENT_TIMEOUT_S = CALL_TIMEOUT_S + 60
"""Seconds that an agent's client waits for an answer: clients' own limits would cut off the longest answers."""


class TaskAgent(Protocol):
    """Works in an environment. Built once per session from its options."""

    async def run(
        self, messages: Sequence[Mapping[str, Any]], *, environment: Environment, endpoint: Endpoint
    ) -> Outcome:
        """Work until done or until one of the agent's limits.

        Args:
            messages: the prompt of the data set's row.
            environment: already reset; the agent neither scores nor closes it.
            endpoint: address of the model; every call is recorded.

        Raises:
            AgentError: the agent failed.
            tree_rl.rollout.sandbox.sandbox.SandboxDied: its sandbox does not answer.
        """


class AgentError(RuntimeError):
    """An agent cannot continue. The trainer keeps its calls and scores its work."""
