"""An agent in an environment: it works on a task and asks the model at an endpoint."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tree_rl.rollout.environments.environment import Environment, Outcome
from tree_rl.rollout.gateway.endpoint import Endpoint


class TaskAgent(Protocol):
    """Works in an environment. Built once per session from its options."""

    async def run(
        self, messages: Sequence[Mapping[str, Any]], *, environment: Environment, endpoint: Endpoint
    ) -> Outcome:
        """Work until done or until a limit of the agent's own.

        Args:
            messages: the task, as the data set words it.
            environment: already reset; the agent neither scores nor closes it.
            endpoint: where the model is asked; every call is recorded.

        Raises:
            AgentError: the agent failed.
            tree_rl.rollout.sandbox.sandbox.SandboxDied: its sandbox did.
        """


class AgentError(RuntimeError):
    """An agent cannot go on. The trainer keeps its calls and scores what it did."""
