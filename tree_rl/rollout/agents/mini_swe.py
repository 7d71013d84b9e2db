"""Runs mini-swe-agent unmodified: its loop, prompts and client, with the gateway as model and a sandbox as shell."""

import asyncio
import concurrent.futures
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from tree_rl.extras import require_modules

require_modules("agent 'mini_swe'", "minisweagent")

import openai

from tree_rl.rollout.agents.task_agent import CLIENT_TIMEOUT_S, AgentError
from tree_rl.rollout.environments.environment import Environment, Outcome
from tree_rl.rollout.gateway.endpoint import Endpoint
from tree_rl.rollout.sandbox.sandbox import SandboxDied

os.environ |= {
    # Ask no questions, fetch no price list, and compute no costs.
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "4",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    **os.environ,  # the user's values win
}
# Both read these variables on import. The import takes seconds, so only sessions of this agent import this module.
import litellm
from litellm.exceptions import APIError, ContextWindowExceededError
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.exceptions import Submitted
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

litellm.suppress_debug_info = True
COMMAND_SECONDS = 1800.0
"""Time after which a command counts as lost; every sandbox's limit is smaller."""
SUBMITTED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SYSTEM = {"system": "Linux", "release": "", "version": "", "machine": "x86_64"}
"""Description of the machine in its prompt. The same everywhere, so that sessions share their prefix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniSweOptions:
    """Options of mini-swe-agent. Raises `ValueError` if `max_turns` is not positive."""

    max_turns: int = 30
    """Limit of model calls (`step_limit`)."""
    config: str = "mini_textbased.yaml"
    """Name or path of mini-swe-agent's config file with prompts; a text-based one."""

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns={self.max_turns}: expected at least 1")


class MiniSweAgent:
    """Runs mini-swe-agent in a thread, as its client library is synchronous."""

    def __init__(self, options: MiniSweOptions | None = None) -> None:
        self.options = options or MiniSweOptions()

    async def run(
        self, messages: Sequence[Mapping[str, Any]], *, environment: Environment, endpoint: Endpoint
    ) -> Outcome:
        """Work on the task: the text of the last user message."""
        task = str(next(message["content"] for message in reversed(messages) if message["role"] == "user"))
        shell = _Shell(environment, asyncio.get_running_loop())
        # A separate thread, because other sessions need the few threads of the event loop.
        threads = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="mini-swe")
        working = asyncio.get_running_loop().run_in_executor(threads, self._work, task, shell, endpoint)
        # Without this, asyncio warns of the exception when nobody waits any more.
        working.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(working)
        finally:
            # A thread cannot be interrupted. It ends when its next command or model call is refused.
            shell.close()
            threads.shutdown(wait=False)
            await asyncio.wait({working})

    def _work(self, task: str, shell: "_Shell", endpoint: Endpoint) -> Outcome:
        settings = get_config_from_spec(self.options.config)
        prompts = {key: settings["agent"][key] for key in ("system_template", "instance_template")}
        asked: dict[str, Any] = {"api_base": endpoint.openai_url, "api_key": endpoint.token, "drop_params": True}
        # The agent retries by itself. Its client would sleep as long as a busy server asks, even after the session.
        asked |= {"max_retries": 0, "timeout": CLIENT_TIMEOUT_S}
        model = _Model(**{**settings.get("model", {}), "model_kwargs": asked}, model_name=f"openai/{endpoint.model}")
        # Do not retry what the gateway refuses for good: the session is over or has made its calls.
        model.abort_exceptions = [*model.abort_exceptions, APIError]
        agent = DefaultAgent(model, shell, **prompts, step_limit=self.options.max_turns, cost_limit=0)
        try:
            with openai.OpenAI(base_url=endpoint.openai_url, api_key=endpoint.token, max_retries=0) as model.client:
                end = agent.run(task)
        except ContextWindowExceededError:
            end = {"exit_status": "LimitsExceeded"}
        except APIError as error:
            if error.status_code != HTTPStatus.FORBIDDEN:
                raise AgentError(f"mini-swe-agent: {error}") from error
            end = {"exit_status": "LimitsExceeded"}
        except (openai.OpenAIError, concurrent.futures.TimeoutError) as error:
            raise AgentError(f"mini-swe-agent: {type(error).__name__}: {error}") from error
        if end["exit_status"] == "RepeatedFormatError":
            raise AgentError("mini-swe-agent: several answers in a row without exactly one action")
        return Outcome(
            answer=end.get("submission", ""),
            turns=agent.n_calls,
            malformed_calls=sum(
                message["role"] == "user" and "Format error" in str(message["content"]) for message in agent.messages
            ),
            is_complete=end["exit_status"] == "Submitted",
        )


class _Model(LitellmTextbasedModel):
    """Uses a client that ends with the session; litellm would keep its clients' connections open for an hour."""

    client: openai.OpenAI

    def query(self, messages: list[dict[str, str]], **kwargs: Any) -> dict[str, Any]:
        answer: dict[str, Any] = super().query(messages, client=self.client, **kwargs)
        return answer


class _Shell:
    """Adapts our environment's `run` to mini-swe-agent's interface; called from its thread."""

    def __init__(self, environment: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._environment = environment
        self._loop = loop
        self.config = None
        self._is_closed = False
        self._running: concurrent.futures.Future[Any] | None = None

    def execute(self, action: Mapping[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        if self._is_closed:
            raise SandboxDied("the session is over")
        running = asyncio.run_coroutine_threadsafe(self._environment.run(action.get("command", "")), self._loop)
        self._running = running
        if self._is_closed:
            running.cancel()
        try:
            result = running.result(COMMAND_SECONDS)
        except concurrent.futures.CancelledError as error:
            raise SandboxDied("the session is over") from error
        first, _, submission = result.output.lstrip().partition("\n")
        if first.strip() == SUBMITTED and result.exit_code == 0:
            end = {"exit_status": "Submitted", "submission": submission}
            raise Submitted({"role": "exit", "content": submission, "extra": end})
        return {
            "output": result.output,
            "returncode": result.exit_code,
            "exception_info": "The command was killed at its time limit." if result.timed_out else "",
        }

    def close(self) -> None:
        self._is_closed = True
        if self._running is not None:
            self._running.cancel()

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """Variables of its prompts."""
        return {**SYSTEM, **kwargs}

    def serialize(self) -> dict[str, Any]:
        """Empty, because the gateway keeps the record."""
        return {}
