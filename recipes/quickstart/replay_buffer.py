"""verl's replay buffer for steps of a few seconds: it looks for finished groups often, not every two seconds."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

POLL_SECONDS = 0.1


class EagerReplayBuffer(ReplayBuffer):
    """Select it with `trainer.v1.sampler.custom_sampler`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(poll_interval=POLL_SECONDS, **settings)
