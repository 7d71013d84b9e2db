"""verl's agent loop manager with trees: merges the rows of a prompt's sessions into a forest when they are done.

Select it with `actor_rollout_ref.rollout.agent.agent_loop_manager_class=<this module>.TreeAgentLoopManager`; it works
with every agent loop. A failed session loses only its own rows.
"""

import asyncio
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from tree_rl.derived_seed import derived_seed
from tree_rl.rollout.branching.grow import grow
from tree_rl.rollout.branching.recording import Recording
from tree_rl.tree.forest import Forest
from tree_rl.verl_plugin import compat
from tree_rl.verl_plugin.agent_loops.agent_loop_options import read_branching
from tree_rl.verl_plugin.agent_loops.gateway_agent_loop import LOOP
from tree_rl.verl_plugin.agent_loops.image_spans import IMAGE_SPANS, spans_of_images, with_image_keys
from tree_rl.verl_plugin.agent_loops.request_seeds import SeededClient, draws_are_seeded
from tree_rl.verl_plugin.agent_loops.tree_dump import FinishedRow, append_tree
from tree_rl.verl_plugin.compat import transfer_queue as tq
from tree_rl.verl_plugin.extra_fields import CALL_WEIGHTS, GENERATED_TOKENS

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
        self._generated: Counter[str] = Counter()
        self._branching = read_branching((custom.get("gateway_agent") or {}).get("branching"))
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
        options = self._branching if partition == "train" and prompt["agent_name"] == LOOP else None
        first = [None if options is None else Recording(number=one, copies=options.copies) for one in range(count)]
        recordings, branches = [one for one in first if one is not None], list[Recording]()
        sampling = dict(sampling_params)
        if not prompt.pop("__do_sample__", True) and not trajectory["validate"]:
            compat.apply_greedy_sampling_params(sampling)
        status = "failure"
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": "running"})
        try:
            run = partial(self._run_session, sampling, trajectory=trajectory, trace=trace, **prompt)
            results = await asyncio.gather(
                *[run(session_id=session, tree_recording=one) for session, one in enumerate(first)],
                return_exceptions=True,
            )
            for session, result in enumerate(results):
                if isinstance(result, BaseException):
                    logger.error("session %d of prompt %s failed and is left out", session, uid, exc_info=result)
            if options is not None:
                finished = [one for one, result in zip(recordings, results, strict=True) if result is None]
                await grow(
                    finished,
                    lambda one: run(session_id=one.number, tree_recording=one),
                    options,
                    branches=branches,
                    number=count,
                    rng=random.Random(derived_seed("branches", trajectory["step"], uid)),
                    vocabulary=len(self.tokenizer),
                    spent=sum(one.generated_tokens for one in recordings if one not in finished),
                )
            rows = self._finished[uid]
            if rows:
                figures = {
                    "first_sessions": sum(result is None for result in results),
                    "branches": len({row.session for row in rows if row.session >= count}),
                    "generated_tokens": self._generated[uid]
                    # Also those of sessions that failed.
                    if options is None
                    else sum(one.generated_tokens for one in (*recordings, *branches)),
                    "replayed_calls": sum(one.replayed_calls for one in branches),
                    "unforked_sessions": sum(one.fault is not None for one in branches),
                }
                await self._publish_tree(rows, partition, figures)
                status = "finished"
        finally:
            self._finished.pop(uid, None)
            self._generated.pop(uid, None)
            # The trainer waits for this status.
            await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": status})
            await asyncio.gather(*[one.close() for one in (*recordings, *branches)], return_exceptions=True)

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
        kwargs.pop("tree_recording", None)
        outputs = output if isinstance(output, list) else [output]
        # In on-policy distillation verl asks the teacher for a session's last row alone.
        ask = self._compute_teacher_logprobs
        others = (ask(row, row.prompt_ids, row.response_ids, validate, kwargs) for row in outputs[:-1])
        await asyncio.gather(*others)
        await super()._agent_loop_postprocess(output, validate, **kwargs)
        self._generated[kwargs["uid"]] += generated_tokens(outputs)
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
                image_spans=tuple(row.extra_fields.get(IMAGE_SPANS, ())),
                **origin(row.extra_fields),
            )
            for index, row in enumerate(outputs)
        ]

    def _compute_multi_modal_inputs(self, output: AgentLoopOutput, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """verl's inputs of a row with images; also notes where the images are, for `_publish_tree`."""
        inputs: dict[str, torch.Tensor] = super()._compute_multi_modal_inputs(output, input_ids)
        if IMAGE_SPANS not in output.extra_fields and inputs.get("pixel_values") is not None:
            token = compat.get_processor_token_id(self.processor, "image")
            size = self.processor.image_processor.merge_size
            found = spans_of_images(input_ids.tolist(), inputs, image_token=token, merge_size=size)
            output.extra_fields[IMAGE_SPANS] = found
        return inputs

    async def _publish_tree(self, rows: list[FinishedRow], partition: str, figures: Mapping[str, int]) -> None:
        """Write a prompt's tree and figures into the tags of its rows."""
        # The rows of large sessions take tenths of a second to merge.
        tokens = [with_image_keys(np.array(row.token_ids), row.image_spans) for row in rows]
        forest = await asyncio.to_thread(Forest.from_rows, tokens)
        tag = {"tree_unique_len": forest.num_unique, "tree_paths": forest.num_rows, "tree_por": float(forest.por)}
        tag |= {f"prompt_{name}": figure for name, figure in figures.items()}
        tags = [
            {
                **tag,
                **({} if row.response_weights is None else {WEIGHS_CALLS: True}),
                **({IMAGE_SPANS: row.image_spans} if row.image_spans else {}),
            }
            for row in rows
        ]
        await tq.async_kv_batch_put(keys=[row.key for row in rows], partition_id=partition, tags=tags)
        if self._dump_folder is not None:
            try:
                await asyncio.to_thread(append_tree, self._dump_folder, partition, rows)
            except OSError:
                logger.exception("prompt %s trains, but its rows are not in tree_dump_dir", rows[0].uid)


def generated_tokens(outputs: Sequence[AgentLoopOutput]) -> int:
    """Number of tokens that the model generated for a session; one that several of its rows share counts once."""
    if not outputs:
        return 0
    counted = outputs[0].extra_fields.get(GENERATED_TOKENS)
    if counted is not None:
        return int(counted)
    forest = Forest.from_rows([np.array(row.prompt_ids + row.response_ids) for row in outputs])
    generated = np.zeros(forest.num_unique, dtype=bool)
    for row, nodes in zip(outputs, forest.row_index, strict=True):
        generated[nodes[len(row.prompt_ids) :][np.array(row.response_mask, dtype=bool)]] = True
    return int(generated.sum())


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
