"""verl's replay buffer of the synchronous trainers, which notes when a step's sessions were waited for and taken."""

import time
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from scripted_steps.scripted_agent_loop import stamp
from tree_rl.verl_plugin.trainer.tree_trainer import POLL_SECONDS


class TimedReplayBuffer(ReplayBuffer):
    """As stock verl has it: it looks for finished groups every two seconds."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """verl's `sample`."""
        asked = time.time()
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        tokens = sum(tag["seq_len"] for tag in batch.tags)
        stamp(step=global_steps, asked=asked, taken=time.time(), rows=len(batch.keys), flat_tokens=tokens)
        return batch, metrics


class TimedTreeReplayBuffer(TimedReplayBuffer):
    """As the tree trainers have it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(poll_interval=POLL_SECONDS, **settings)
