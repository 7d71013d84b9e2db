"""verl agent loop `tree_gateway_agent`: any agent that speaks OpenAI's or Anthropic's protocol, one row per branch.

Configured by `actor_rollout_ref.rollout.custom.gateway_agent`. All sessions of a rollout worker share one gateway.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from tree_rl.rollout.expert_routes import routes_of_row
from tree_rl.rollout.gateway.agent_protocol import Agent, AgentResult
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.seeds import derived_seed
from tree_rl.rollout.transcript import ModelCall, Row, rows_of_calls
from tree_rl.verl_plugin.agent_loops.gateway_shared import SharedGateways

logger = logging.getLogger(__name__)

CONFIG_KEY = "actor_rollout_ref.rollout.custom.gateway_agent"
CANCEL_GRACE_S = 30.0
"""How long a cancelled agent may take to clean up; then its siblings go on without waiting for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayAgentOptions:
    """How agents run.

    Raises:
        ValueError: a value is out of range; the message names its key.
    """

    agent: str
    """Class of the agent, as `package.module.Class`."""
    agent_options: Mapping[str, Any]
    """Arguments of its constructor."""
    session_timeout_s: float = 1800.0
    """An agent that takes longer is cancelled."""
    failed_reward: float | None = None
    """Reward of a session whose agent failed or was cancelled; None drops the session, its siblings stay."""
    seed: int | None = None
    """Makes rollouts repeatable: every call draws its own random numbers, decided by this, the step, the prompt's index
    in the data set, the session and the call's prompt. None leaves them to the server, where who asks first counts."""
    gateway: GatewayOptions

    def __post_init__(self) -> None:
        if self.session_timeout_s <= 0:
            raise ValueError(f"{CONFIG_KEY}.session_timeout_s={self.session_timeout_s}: expected more than 0 seconds")


@register("tree_gateway_agent")
class TreeGatewayAgentLoop(AgentLoopBase):
    """Runs an agent against the worker's gateway and turns its session into rows.

    Args:
        args: verl's.
        kwargs: verl's.
    """

    gateways: ClassVar[SharedGateways] = SharedGateways()

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Run one session.

        Args:
            sampling_params: for every call of the session.
            kwargs: the data set's row: `raw_prompt`, `extra_info`, ...

        Returns:
            One output per branch, all with the session's reward.

        Raises:
            ValueError: the model generated nothing.
        """
        configured = (self.rollout_config.get("custom") or {}).get("gateway_agent") or {}
        options = read_gateway_options(
            configured,
            max_context_tokens=self.rollout_config.prompt_length + self.rollout_config.response_length,
            max_turn_tokens=self.rollout_config.response_length,
            template_options=self.apply_chat_template_kwargs,
        )
        if options.seed is not None:
            places = [str(kwargs.get(name)) for name in ("global_steps", "index", "session_id")]
            sampling_params = {**sampling_params, "seed": derived_seed(options.seed, *places)}
        agent = _agent_class(options.agent)(**options.agent_options)
        started = time.monotonic()
        server = self.rollout_config.get("name", "vllm")
        async with self.gateways.lend(self.server_manager, self.tokenizer, options.gateway, server=server) as gateway:
            session = gateway.open_session(sampling=sampling_params)
            try:
                result = await self._act(agent, gateway.endpoint(session), options, kwargs)
            finally:
                record = await gateway.close_session(session)
        figures = {
            "calls": len(record.calls),
            "cancelled_calls": record.cancelled,
            "refused_calls": sum(record.refused.values()),
            "drift_avoided": record.drift.num_avoided,
            "drift_branches": len(record.drift.siblings),
            "failed": float(result.status in ("failed", "timed_out")),
            **result.figures,
        }
        metrics = AgentLoopMetrics(
            generate_sequences=record.model_seconds,
            tool_calls=max(0.0, time.monotonic() - started - record.model_seconds),
            num_preempted=0,
        )
        return rows_to_outputs(record.calls, reward=result.reward, figures=figures, metrics=metrics)

    async def _act(
        self, agent: Agent, endpoint: Any, options: GatewayAgentOptions, sample: Mapping[str, Any]
    ) -> AgentResult:
        messages = [dict(message) for message in sample["raw_prompt"]]
        run = asyncio.create_task(agent.run(endpoint, messages=messages, task=sample.get("extra_info") or {}))
        try:
            await asyncio.wait({run}, timeout=options.session_timeout_s)
        finally:
            timed_out = not run.done()
            run.cancel()
            await asyncio.wait({run}, timeout=CANCEL_GRACE_S)
        if timed_out:
            error: BaseException | None = TimeoutError(
                f"agent {options.agent} took longer than {CONFIG_KEY}.session_timeout_s={options.session_timeout_s}"
            )
        else:
            error = run.exception()
        if error is None:
            return run.result()
        if options.failed_reward is None:
            raise error
        logger.warning("agent %s failed and gets reward %s", options.agent, options.failed_reward, exc_info=error)
        return AgentResult(reward=options.failed_reward, status="timed_out" if timed_out else "failed")


def rows_to_outputs(
    calls: tuple[ModelCall, ...], *, reward: float, figures: Mapping[str, float], metrics: AgentLoopMetrics
) -> list[AgentLoopOutput]:
    """Turn a session into verl's outputs.

    Args:
        calls: of the session.
        reward: of every row.
        figures: numbers of the session.
        metrics: its times.

    Raises:
        ValueError: the model generated nothing.
    """
    rows = rows_of_calls(calls)
    if not rows or not rows[0].response_ids:
        raise ValueError("session without a generated token: the agent made no call that was answered")
    turns = max(call.turn for call in calls) + 1
    return [
        AgentLoopOutput(
            prompt_ids=list(row.prompt_ids),
            response_ids=list(row.response_ids),
            response_mask=list(row.response_mask),
            response_logprobs=None if row.response_log_probs is None else list(row.response_log_probs),
            routed_experts=routes_of_row(row, [call.routes for call in calls]),
            reward_score=reward,
            num_turns=2 * turns,
            metrics=metrics,
            extra_fields={
                "turn_scores": [],
                "tool_rewards": [],
                "reward_extra_info": {**figures, "branches": len(rows)},
                **provenance(row, calls),
            },
        )
        for row in rows
    ]


def provenance(row: Row, calls: tuple[ModelCall, ...]) -> dict[str, Any]:
    """Where a row's tokens come from, for verl's fields.

    Args:
        row: of the session.
        calls: of the session.

    Returns:
        `response_calls` (one entry per response token, -1 for context), `call_turns, call_agents, call_versions` (one
        per call of the session), and verl's own span of weight versions over the row's trained tokens.
    """
    own = [calls[index] for index in sorted(set(row.response_calls) - {-1})]
    return {
        "response_calls": list(row.response_calls),
        "call_turns": [call.turn for call in calls],
        "call_agents": [call.agent for call in calls],
        "call_versions": [(call.min_version, call.max_version) for call in calls],
        "min_global_steps": min((v for call in own if (v := call.min_version) is not None), default=None),
        "max_global_steps": max((v for call in own if (v := call.max_version) is not None), default=None),
    }


def read_gateway_options(
    given: Mapping[str, Any], *, max_context_tokens: int, max_turn_tokens: int, template_options: Mapping[str, Any]
) -> GatewayAgentOptions:
    """Read the options of `rollout.custom.gateway_agent`.

    Args:
        given: fields of `GatewayAgentOptions`, and under `gateway` fields of `GatewayOptions`.
        max_context_tokens: default of that field.
        max_turn_tokens: default of that field.
        template_options: verl's `data.apply_chat_template_kwargs`.

    Raises:
        ValueError: an unknown key, a bad value or no agent, named.
    """
    options = {key: value for key, value in given.items() if value is not None}
    _refuse_unknown(CONFIG_KEY, options, [field.name for field in fields(GatewayAgentOptions)])
    if not options.get("agent"):
        raise ValueError(
            f"{CONFIG_KEY}.agent: expected the class of an agent as package.module.Class, received nothing"
        )
    gateway = {key: value for key, value in dict(options.pop("gateway", {})).items() if value is not None}
    _refuse_unknown(f"{CONFIG_KEY}.gateway", gateway, [field.name for field in fields(GatewayOptions)])
    gateway = {
        "max_context_tokens": max_context_tokens,
        "max_turn_tokens": max_turn_tokens,
        "template_options": dict(template_options),
        **gateway,
    }
    options = {"agent_options": {}, **options}
    return GatewayAgentOptions(**options, gateway=GatewayOptions(**gateway))


def _refuse_unknown(key: str, given: Mapping[str, Any], known: list[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"{key}.{unknown[0]}: no such option; known are {', '.join(known)}")


@cache
def _agent_class(path: str) -> type[Any]:
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(f"{CONFIG_KEY}.agent={path!r}: expected a class as package.module.Class")
    found: type[Any] = getattr(import_module(module), name)
    return found
