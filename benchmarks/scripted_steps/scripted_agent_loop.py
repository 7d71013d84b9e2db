"""verl's agent loop that plays a recorded script, and verl's replay buffer, which notes when sessions were taken.

The loop asks for exactly as many tokens a turn as the script says.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from scripted_steps.session_scripts import Script, play_session, script_with_overlap, tool_seconds_of
from tree_rl.rollout.transcript import ModelCall
from tree_rl.verl_plugin.agent_loops.gateway_backend import VerlBackend
from tree_rl.verl_plugin.agent_loops.session_outputs import rows_to_outputs
from tree_rl.verl_plugin.trainer.tree_trainer import POLL_SECONDS

STAMPS = "TREE_RL_STEP_STAMPS"
"""Variable that names the folder of the stamps."""


def stamp(**figures: Any) -> None:
    """Append a line to this process's file of stamps."""
    path = Path(os.environ[STAMPS]) / f"{os.getpid()}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(figures) + "\n")


@cache
def known_script(**arguments: Any) -> Script:
    """`script_with_overlap` once a process: it takes a second, and all sessions of a worker share one event loop."""
    return script_with_overlap(**arguments)


class ScriptedAgentLoop(AgentLoopBase):
    """Plays the session that prompt and sample name; `script` holds arguments of `script_with_overlap`.

    In the first `warm_up["steps"]` steps a session ends after `warm_up["turns"]` turns (None: it does not). Every tool
    call takes `tool_seconds`, of which the steps behind `unmeasured` take one after the other.
    """

    def __init__(
        self,
        *,
        script: Mapping[str, Any],
        vocab: int,
        tool_seconds: Sequence[float],
        unmeasured: int,
        warm_up: Mapping[str, Any],
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        single_turn = tuple(script["single_turn"]) if script["single_turn"] else None
        self._script = known_script(**{**script, "single_turn": single_turn})
        self._vocab, self._warm_up = vocab, warm_up
        self._tool_seconds, self._unmeasured = tool_seconds, unmeasured

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """One session, as `play_session` plays it."""
        group, session = int(kwargs["extra_info"]["index"]), int(kwargs["session_id"])
        step = int(kwargs["global_steps"])
        stamp(step=step, started=time.time())
        backend, name = VerlBackend(self.server_manager, end_token_ids=frozenset()), uuid4().hex
        calls: list[ModelCall] = []

        async def ask(context: list[int], wanted: int) -> list[int]:
            generation = await backend.generate(
                context, max_tokens=wanted, sampling={**sampling_params, "ignore_eos": True}, session=name
            )
            calls.append(
                ModelCall(
                    prompt_ids=tuple(context),
                    response_ids=generation.token_ids,
                    log_probs=generation.log_probs,
                    turn=len(calls),
                    min_version=generation.min_version,
                    max_version=generation.max_version,
                )
            )
            return list(generation.token_ids)

        script = self._script.groups[group][session]
        if step <= self._warm_up["steps"]:
            script = replace(script, turns=script.turns[: self._warm_up["turns"]])
        wait = tool_seconds_of(step, self._tool_seconds, self._unmeasured)
        await play_session(script, (group, session), ask, vocab=self._vocab, tool_seconds=wait)
        reward = (7 * group + 3 * session) % 5 / 4
        outputs = rows_to_outputs(tuple(calls), reward=reward, figures={}, metrics=AgentLoopMetrics())
        generated = sum(len(call.response_ids) for call in calls)
        stamp(step=step, ended=time.time(), generated=generated)
        return outputs


class Timed:
    """Goes before one of verl's buffers among the base classes."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """verl's `sample`."""
        asked = time.time()
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        tokens = sum(tag["seq_len"] for tag in batch.tags)
        stamp(step=global_steps, asked=asked, taken=time.time(), rows=len(batch.keys), flat_tokens=tokens)
        return batch, metrics


class OfTrees(Timed):
    """Looks as often as the tree trainers do; stock verl looks for finished groups every two seconds."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(poll_interval=POLL_SECONDS, **settings)


class TimedReplayBuffer(Timed, ReplayBuffer):
    """As stock verl has it."""


class TimedReplayBufferAsync(Timed, ReplayBufferAsync):
    """As stock verl has it where rollout and training have GPUs of their own."""


class TimedTreeReplayBuffer(OfTrees, ReplayBuffer):
    """As `tree_sync` has it."""


class TimedTreeReplayBufferAsync(OfTrees, ReplayBufferAsync):
    """As `tree_separate_async` has it."""
