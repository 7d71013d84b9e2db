"""verl's agent loop manager with trees: merges the rows of a prompt's sessions into a forest when they are done.

Select it with `actor_rollout_ref.rollout.agent.agent_loop_manager_class=<this module>.TreeAgentLoopManager`; it works
with every agent loop. A failed session loses only its own rows.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from tree_rl.tree.forest import Forest
from tree_rl.verl_plugin import compat
from tree_rl.verl_plugin.agent_loops.request_seeds import SeededClient, draws_are_seeded
from tree_rl.verl_plugin.agent_loops.session_outputs import CALL_WEIGHTS
from tree_rl.verl_plugin.agent_loops.tree_dump import FinishedRow, append_tree
from tree_rl.verl_plugin.compat import transfer_queue as tq

logger = logging.getLogger(__name__)

WEIGHS_CALLS = "weighs_calls"
"""Tag of rows with token weights other than 1."""


class TreeAgentLoopWorker(compat.AgentLoopWorkerTQ.__ray_actor_class__):
    """verl's worker; also writes `tree_unique_len, tree_paths, tree_por` into the rows' tags.

    It also appends every prompt's rows to the folder `rollout.custom.tree_dump_dir`, if that is set.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        custom = self.config.actor_rollout_ref.rollout.get("custom") or {}
        folder = custom.get("tree_dump_dir")
        self._dump_folder = Path(folder) if folder else None
        self._finished: dict[str, list[FinishedRow]] = defaultdict(list)
        client: Any = self.llm_client  # type: ignore[has-type]
        self._seeds = SeededClient(client) if draws_are_seeded(self.config.actor_rollout_ref.rollout) else None
        self.llm_client = self._seeds or client

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        """Run all sessions of one prompt; the prompt fails if no session produces a row."""
        uid, partition = prompt["uid"], "val" if trajectory["validate"] else "train"
        config = self.config.actor_rollout_ref.rollout
        count = prompt.pop("__rollout_n__", config.val_kwargs.n if trajectory["validate"] else config.n)
        sampling = dict(sampling_params)
        if not prompt.pop("__do_sample__", True) and not trajectory["validate"]:
            compat.apply_greedy_sampling_params(sampling)
        status = "failure"
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": "running"})
        try:
            results = await asyncio.gather(
                *[
                    self._run_session(sampling, trajectory=trajectory, trace=trace, session_id=session, **prompt)
                    for session in range(count)
                ],
                return_exceptions=True,
            )
            for session, result in enumerate(results):
                if isinstance(result, BaseException):
                    logger.error("session %d of prompt %s failed and is left out", session, uid, exc_info=result)
            rows = self._finished.pop(uid, [])
            if rows:
                await self._publish_tree(rows, partition)
                status = "finished"
        finally:
            # The trainer waits for this status.
            await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": status})

    async def _run_session(
        self, sampling_params: dict[str, Any], *, trajectory: dict[str, Any], session_id: int, **prompt: Any
    ) -> None:
        """Run one session, seeded so that a restarted run uses the same random numbers."""
        if self._seeds is None:
            await self._run_agent_loop(sampling_params, trajectory=trajectory, session_id=session_id, **prompt)
            return
        # verl gives validation prompts random uids.
        row = ("val", prompt.get("index", 0)) if trajectory["validate"] else ("train", prompt["uid"])
        seed = self._seeds.open_session(
            self.config.actor_rollout_ref.rollout.seed, trajectory["step"], *row, session_id
        )
        try:
            seeded = {**sampling_params, "seed": seed}
            await self._run_agent_loop(seeded, trajectory=trajectory, session_id=session_id, **prompt)
        finally:
            self._seeds.close_session(seed)

    async def _agent_loop_postprocess(
        self, output: AgentLoopOutput | list[AgentLoopOutput], validate: bool, **kwargs: Any
    ) -> None:
        """Store a session's rows as verl does, and keep them for the tree."""
        await super()._agent_loop_postprocess(output, validate, **kwargs)
        outputs = output if isinstance(output, list) else [output]
        self._finished[kwargs["uid"]] += [
            FinishedRow(
                uid=kwargs["uid"],
                session=kwargs["session_id"],
                index=index,
                step=kwargs["global_steps"],
                prompt_ids=tuple(row.prompt_ids),
                response_ids=tuple(row.response_ids),
                response_mask=tuple(row.response_mask),
                reward=row.reward_score,
                weight_version=row.extra_fields.get("max_global_steps"),
                **origin(row.extra_fields),
            )
            for index, row in enumerate(outputs)
        ]

    async def _publish_tree(self, rows: list[FinishedRow], partition: str) -> None:
        # The rows of large sessions take tenths of a second to merge.
        forest = await asyncio.to_thread(Forest.from_rows, [row.prompt_ids + row.response_ids for row in rows])
        tag = {"tree_unique_len": forest.num_unique, "tree_paths": forest.num_rows, "tree_por": float(forest.por)}
        tags = [{**tag, **({} if row.response_weights is None else {WEIGHS_CALLS: True})} for row in rows]
        await tq.async_kv_batch_put(keys=[row.key for row in rows], partition_id=partition, tags=tags)
        if self._dump_folder is not None:
            await asyncio.to_thread(append_tree, self._dump_folder, partition, rows)


def origin(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Agents, side calls and weights of a row's tokens as fields of `FinishedRow`; empty if its loop reports none."""
    if "response_calls" not in extra:
        return {}
    own = sorted(set(extra["response_calls"]) - {-1})
    weights = extra.get(CALL_WEIGHTS)
    return {
        "agents": tuple(dict.fromkeys(extra["call_agents"][call] for call in own)),
        "sides": tuple(dict.fromkeys(side for call in own if (side := extra["call_sides"][call]) is not None)),
        "response_weights": None if weights is None else tuple(weights),
    }


class TreeAgentLoopManager(compat.AgentLoopManagerTQ):
    """Starts `TreeAgentLoopWorker`s; the arguments are verl's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(TreeAgentLoopWorker)
