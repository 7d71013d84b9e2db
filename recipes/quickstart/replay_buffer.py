"""verl's replay buffers for steps of a few seconds: they look for finished groups often, not every two seconds."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

POLL_SECONDS = 0.1


class EagerReplayBuffer(ReplayBuffer):
    """Of `tree_sync`; select it with `trainer.v1.sampler.custom_sampler`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(poll_interval=POLL_SECONDS, **settings)


class EagerReplayBufferAsync(ReplayBufferAsync):
    """Of the asynchronous trainers."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(poll_interval=POLL_SECONDS, **settings)
