"""Runs any command-line agent in a sandbox, with environment variables that direct it to the model.

In a `local` sandbox the agent and everything it starts can connect to the session's gateway alone, and HOME is the
repository's directory.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from tree_rl.rollout.agents.task_agent import AgentError
from tree_rl.rollout.environments.environment import Environment, Outcome
from tree_rl.rollout.gateway.endpoint import Endpoint
from tree_rl.rollout.sandbox.processes.limits import Limits

PORT = 8700
"""Port of the gateway inside bubblewrap. The same in every session, so that prompts do not differ."""
LAST_LINES = 20
"""Number of lines of a failed program's output in the training log."""


def program_limits() -> Limits:
    """Default limits of a program and everything it starts."""
    return Limits(
        timeout_seconds=1800,
        output_bytes=1 << 20,
        file_bytes=256 << 20,
        # V8 and other runtimes reserve far more address space than they use.
        memory_bytes=1 << 47,
        processes=256,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandLineOptions:
    """The program and its limits. Raises `ValueError` if `command` has no `{prompt}`."""

    command: str
    """Shell command; `{prompt}` is replaced by the quoted task, and `{model}` by the model's name. For example
    `claude --print --dangerously-skip-permissions {prompt}`."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables besides those of `Endpoint.environment()`; a PATH here replaces the default one. `{model}`
    is replaced here too."""
    limits: Limits = field(default_factory=program_limits)
    """Limits of the program and everything it starts."""

    def __post_init__(self) -> None:
        if "{prompt}" not in self.command:
            raise ValueError(f"command={self.command!r}: expected the place of the task, {{prompt}}")


class CommandLineAgent:
    """Runs the program by the environment's `run_agent`, which `SweEnvironment` has. The task is all messages' text."""

    def __init__(self, options: CommandLineOptions) -> None:
        self.options = options

    async def run(
        self, messages: Sequence[Mapping[str, Any]], *, environment: Environment, endpoint: Endpoint
    ) -> Outcome:
        if not hasattr(environment, "run_agent"):
            raise AgentError(f"command_line needs an environment with run_agent, received {type(environment).__name__}")
        runs: Any = environment
        address = urlsplit(endpoint.url)
        assert address.hostname is not None and address.port is not None
        if runs.has_model_port:
            endpoint = replace(endpoint, url=f"http://127.0.0.1:{PORT}{address.path}")
        prompt = "\n\n".join(str(message["content"]) for message in messages)
        command = self.options.command.replace("{model}", endpoint.model).replace("{prompt}", shlex.quote(prompt))
        own = {name: value.replace("{model}", endpoint.model) for name, value in self.options.variables.items()}
        result = await runs.run_agent(
            command,
            variables={**endpoint.environment(), **own},
            gateway=(address.hostname, address.port),
            port=PORT,
            limits=self.options.limits,
        )
        if result.exit_code != 0 and not result.timed_out:
            last = "\n".join(result.output.rstrip().splitlines()[-LAST_LINES:])
            raise AgentError(f"its program ended with status {result.exit_code}; its last lines:\n{last[-2000:]}")
        return Outcome(answer=result.output, turns=0, malformed_calls=0, is_complete=not result.timed_out)
