"""verl's agent loop `tree_gateway_agent`: runs any agent against the gateway, and makes one row per branch.

`actor_rollout_ref.rollout.custom.gateway_agent` configures it. Sessions of a worker with equal options share a gateway.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from tree_rl.derived_seed import derived_seed
from tree_rl.rollout.branching.recording import NotForked, Recording
from tree_rl.rollout.gateway.agent_protocol import UNREPORTED, Agent, AgentResult
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.tokens.images import IMAGE
from tree_rl.verl_plugin.agent_loops.agent_loop_options import (
    CONFIG_KEY,
    GatewayAgentOptions,
    agent_class,
    read_gateway_options,
)
from tree_rl.verl_plugin.agent_loops.gateway_shared import SharedGateways
from tree_rl.verl_plugin.agent_loops.session_images import SessionImages
from tree_rl.verl_plugin.agent_loops.session_outputs import figures_of_calls, rows_to_outputs

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 60.0
"""Longest wait for a cancelled agent to clean up; then its siblings continue. `AgentInEnvironment` waits at most 20 s
for an agent to end, and then deletes its files."""

MEDIA = ("image", "video", "audio")
"""Types of content with which verl's data set replaces `<image>` and the like."""
LOOP = "tree_gateway_agent"
"""Its name in verl's configuration."""
GatewaySettings = tuple[GatewayAgentOptions, GatewayOptions]
"""Options of one session and of its gateway."""


@register(LOOP)
class TreeGatewayAgentLoop(AgentLoopBase):
    """Runs an agent against the worker's gateway and turns its session into rows."""

    gateways: ClassVar[SharedGateways] = SharedGateways()

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Run one session.

        Args:
            sampling_params: sampling parameters of all calls.
            kwargs: the data set's row: `raw_prompt`, `extra_info`, ... `tree_recording` is where a session keeps what
                it does, if others may branch from it; None: they do not.

        Returns:
            One output per branch, each with the session's reward.

        Raises:
            ValueError: the model generated nothing.
            NotForked: a branch did not come to its cut.
        """
        options, gateway_options = self.settings(kwargs.get("extra_info") or {})
        _refuse_media(kwargs["raw_prompt"])
        if options.seed is not None:
            places = [str(kwargs.get(name)) for name in ("global_steps", "index", "session_id")]
            sampling_params = {**sampling_params, "seed": derived_seed(options.seed, *places)}
        agent = agent_class(options.agent)(**options.agent_options)
        recording: Recording | None = kwargs.get("tree_recording")
        resumption = None
        if recording is not None:
            agent.record(recording)
            resumption = None if recording.fork is None else recording.fork.resumption()
        started = time.monotonic()
        server = self.rollout_config.get("name", "vllm")
        images = None
        if getattr(self.processor, "image_token", None) == IMAGE:
            images = SessionImages(self.processor, self.mm_processor_kwargs)
        lent = self.gateways.lend(self.server_manager, self.tokenizer, gateway_options, server=server, images=images)
        async with lent as gateway:
            session = gateway.open_session(sampling=sampling_params, group=kwargs.get("uid"), resumption=resumption)
            try:
                result = await self._act(agent, gateway.endpoint(session), options, kwargs)
            finally:
                record = await gateway.close_session(session)
                if recording is not None:
                    recording.finish(session.name, record.calls, resumption)
        if recording is not None:
            if recording.fault is not None:
                raise NotForked(recording.fault)
            recording.reward = result.reward
        figures = {
            "calls": len(record.calls),
            "cancelled_calls": record.cancelled,
            "refused_calls": sum(record.refused.values()),
            "left_out": sum(record.left_out.values()),
            "constrained_calls": record.constrained,
            "prefix_queries": record.prefix_queries,
            "prefix_hits": record.prefix_hits,
            **figures_of_calls(record.calls, sorted({one.name for one in gateway_options.side_calls})),
            **record.drift.figures(),
            "failed": 0.0,
            **result.figures,
        }
        if figures["failed"]:
            # gdpo and DAPO's filter end the job if a session lacks one that they read.
            figures = dict.fromkeys(_figures_read(self.config.get("algorithm") or {}), 0.0) | figures
        metrics = AgentLoopMetrics(
            generate_sequences=record.model_seconds,
            tool_calls=max(0.0, time.monotonic() - started - record.model_seconds),
            num_preempted=0,
        )
        # Sessions with the same start by chance did not grow from each other.
        grown = {} if recording is None else {"tree": recording.tree}
        # A thousand branches take a second.
        return await asyncio.to_thread(
            rows_to_outputs,
            record.calls,
            reward=result.reward,
            figures=figures,
            metrics=metrics,
            credit={**grown, **result.credit},
            images=gateway.images,
        )

    def settings(self, task: Mapping[str, Any]) -> GatewaySettings:
        """Read the options of a session and its gateway. Raises `ValueError` for an unknown key or a bad value."""
        return self._read((self.rollout_config.get("custom") or {}).get("gateway_agent") or {})

    def _read(self, configured: Mapping[str, Any]) -> GatewaySettings:
        return read_gateway_options(
            configured,
            max_context_tokens=self.rollout_config.prompt_length + self.rollout_config.response_length,
            max_turn_tokens=self.rollout_config.response_length,
            template_options=self.apply_chat_template_kwargs,
        )

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
            if not run.done():
                logger.error("agent %s still runs %g s after it was cancelled", options.agent, CANCEL_GRACE_S)
        if timed_out:
            error: BaseException | None = TimeoutError(
                f"agent {options.agent} took longer than {CONFIG_KEY}.session_timeout_s={options.session_timeout_s}"
            )
        else:
            cancelled = RuntimeError(f"agent {options.agent} cancelled itself")
            error = cancelled if run.cancelled() else run.exception()
        if error is None:
            return run.result()
        if options.failed_reward is None:
            raise error
        logger.warning("agent %s failed and gets reward %s", options.agent, options.failed_reward, exc_info=error)
        return AgentResult(reward=options.failed_reward, status="failed", figures={"failed": 1.0}, credit=UNREPORTED)


def _figures_read(algorithm: Mapping[str, Any]) -> list[str]:
    """Names of the sessions' figures that verl's `algorithm` node asks for; its own name `reward` is none."""
    groups = algorithm.get("filter_groups") or {}
    filtered_by = [groups["metric"]] if groups.get("enable") and groups.get("metric") != "reward" else []
    return [*(algorithm.get("gdpo_reward_keys") or ()), *filtered_by]


def _refuse_media(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a sample with images, because agents read text; they may send images of their own."""
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    media = [part["type"] for part in parts if part.get("type") in MEDIA]
    if media:
        raise ValueError(
            f"the sample has {media[0]} content, and agents get a sample's text alone; set its agent_name to one of "
            "verl's agent loops, such as tool_agent"
        )
