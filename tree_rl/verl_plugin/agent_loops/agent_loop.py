"""verl agent loop `tree_tool_agent`: one session of `tree_rl.rollout` per sample, one row per branch.

Configured by `actor_rollout_ref.rollout.custom.tree_agent`, and per sample by `extra_info.tree_agent` of the data set.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib import import_module
from typing import Any
from uuid import uuid4

import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from tree_rl.rollout.chat import Chat
from tree_rl.rollout.environment import Environment
from tree_rl.rollout.expert_routes import routes_of_row
from tree_rl.rollout.session import SessionOptions, SessionRecord, run_session
from tree_rl.rollout.transcript import Row, rows_of_calls

CONFIG_KEY = "actor_rollout_ref.rollout.custom.tree_agent"
DEFAULT_ENVIRONMENT = "tree_rl.rollout.environment.ShellEnvironment"


@register("tree_tool_agent")
class TreeToolAgentLoop(AgentLoopBase):
    """Multi-turn tool use whose sessions branch.

    Args:
        args: verl's.
        kwargs: verl's; its tools are not used, an environment brings its own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.chat = Chat(self.tokenizer, self.apply_chat_template_kwargs)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Run one session.

        Args:
            sampling_params: for every turn.
            kwargs: the data set's row: `raw_prompt`, `extra_info`, ...

        Returns:
            One output per branch, all with the session's reward.
        """
        task = kwargs.get("extra_info") or {}
        configured = (self.rollout_config.get("custom") or {}).get("tree_agent") or {}
        environment, options = read_agent_options(
            {**configured, **(task.get("tree_agent") or {})},
            max_prompt_tokens=self.rollout_config.prompt_length,
            max_response_tokens=self.rollout_config.response_length,
        )
        model = _RecordingModel(self.server_manager, sampling_params)
        started = time.monotonic()
        record = await run_session(
            messages=[dict(message) for message in kwargs["raw_prompt"]],
            task=task,
            chat=self.chat,
            environment=environment(),
            generate=model,
            options=options,
        )
        return to_outputs(record, model, seconds=time.monotonic() - started)


class _RecordingModel:
    """verl's LLM client as a `Generate`, noting time and weight versions."""

    def __init__(self, client: Any, sampling_params: Mapping[str, Any]) -> None:
        self._client = client
        self._sampling_params = sampling_params
        # One id per session keeps its turns on one server, where its prefix is cached.
        self._request_id = uuid4().hex
        self.seconds = 0.0
        self.preempted = 0
        self.versions: list[tuple[int | None, int | None]] = []
        """Oldest and newest weights that generated in each call, in the order in which calls were answered."""
        self.routes: list[np.ndarray | None] = []
        """[prompt and response tokens, L, K] of each call, experts that its tokens visited; None: not recorded."""

    async def __call__(self, prompt_ids: list[int], *, max_tokens: int) -> tuple[list[int], list[float] | None]:
        started = time.monotonic()
        output = await self._client.generate(
            request_id=self._request_id,
            prompt_ids=prompt_ids,
            sampling_params={**self._sampling_params, "max_tokens": max_tokens},
        )
        self.seconds += time.monotonic() - started
        self.preempted += output.num_preempted or 0
        self.versions.append((output.extra_fields.get("min_global_steps"), output.extra_fields.get("max_global_steps")))
        self.routes.append(None if output.routed_experts is None else np.asarray(output.routed_experts))
        return list(output.token_ids), output.log_probs or None


def to_outputs(record: SessionRecord, model: _RecordingModel, *, seconds: float) -> list[AgentLoopOutput]:
    """Turn a session into verl's outputs.

    Args:
        record: the session.
        model: what generated it.
        seconds: wall-clock time of the session.

    Raises:
        ValueError: the model generated nothing.
    """
    rows = rows_of_calls(record.calls)
    if not rows or not rows[0].response_ids:
        raise ValueError("session without a generated token; was it aborted before its first turn?")
    details = {
        "turns": record.outcome.turns,
        "tool_calls": record.tool_calls,
        "malformed_calls": record.outcome.malformed_calls,
        "is_complete": float(record.outcome.is_complete),
        "branches": len(rows),
    }
    return [
        AgentLoopOutput(
            prompt_ids=list(row.prompt_ids),
            response_ids=list(row.response_ids),
            response_mask=list(row.response_mask),
            response_logprobs=None if row.response_log_probs is None else list(row.response_log_probs),
            routed_experts=routes_of_row(row, model.routes),
            reward_score=record.reward,
            num_turns=2 * record.outcome.turns,
            metrics=AgentLoopMetrics(
                generate_sequences=model.seconds,
                tool_calls=max(0.0, seconds - model.seconds),
                num_preempted=model.preempted,
            ),
            extra_fields={
                "turn_scores": [],
                "tool_rewards": [],
                "reward_extra_info": dict(details),
                **version_span(row, model.versions),
            },
        )
        for row in rows
    ]


def version_span(row: Row, versions: Sequence[tuple[int | None, int | None]]) -> dict[str, int | None]:
    """verl's span of weight versions over the tokens that a row trains, over the session's if it trains none.

    Both are None where the server reports no versions.

    Args:
        row: of the session.
        versions: oldest and newest version of each call of the session.
    """
    own = [versions[call] for call in sorted(set(row.response_calls) - {-1})] or versions
    return {
        "min_global_steps": min((oldest for oldest, _ in own if oldest is not None), default=None),
        "max_global_steps": max((newest for _, newest in own if newest is not None), default=None),
    }


def read_agent_options(
    given: Mapping[str, Any], *, max_prompt_tokens: int, max_response_tokens: int
) -> tuple[type[Environment], SessionOptions]:
    """Read the agent's options.

    Args:
        given: `environment` (a class as `package.module.Class`) and fields of `SessionOptions`; None means default.
        max_prompt_tokens: default of that field.
        max_response_tokens: default of that field, and of `max_turn_tokens`.

    Raises:
        ValueError: an unknown key or bad value, named.
    """
    options: dict[str, Any] = {
        "max_prompt_tokens": max_prompt_tokens,
        "max_response_tokens": max_response_tokens,
        "max_turn_tokens": max_response_tokens,
    }
    options |= {key: value for key, value in given.items() if value is not None}
    environment = options.pop("environment", DEFAULT_ENVIRONMENT)
    known = [field.name for field in fields(SessionOptions)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"{CONFIG_KEY}.{unknown[0]}: no such option; known are environment, {', '.join(known)}")
    return _environment_class(environment), SessionOptions(**options)


@cache
def _environment_class(path: str) -> type[Environment]:
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(f"{CONFIG_KEY}.environment={path!r}: expected a class as package.module.Class")
    found: type[Environment] = getattr(import_module(module), name)
    return found
