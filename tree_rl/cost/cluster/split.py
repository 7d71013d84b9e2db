"""How many GPUs roll out and how many train, where both run at once (`trainer_mode=tree_separate_async`)."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLoad:
    """Work of a step. GPU-seconds spread evenly over any number of GPUs."""

    rollout: float
    """GPU-seconds of the rollouts."""
    training: float
    """GPU-seconds of everything the trainer does."""
    weights: float = 0.0
    """Seconds for new weights to reach the rollout, in which all GPUs wait."""
    metrics: float = 0.0
    """Seconds of the step's metrics, for which the trainer's GPUs wait; taking turns, rollouts run beside them."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"StepLoad.{name}: expected seconds, at least 0, received {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """A step whose rollout and training have GPUs of their own; the slower side decides."""

    load: StepLoad
    rollout_gpus: int
    training_gpus: int

    @property
    def step(self) -> float:
        """Seconds of the step."""
        training = self.load.training / self.training_gpus + self.load.metrics
        return max(self.load.rollout / self.rollout_gpus, training) + self.load.weights

    @property
    def rollout_idle(self) -> float:
        """Share of the step in which the rollout's GPUs do nothing."""
        return _idle(self.load.rollout / self.rollout_gpus, self.step)

    @property
    def training_idle(self) -> float:
        """Share of the step in which the trainer's GPUs do nothing."""
        return _idle(self.load.training / self.training_gpus, self.step)

    @property
    def gpu_seconds(self) -> float:
        """Seconds of all GPUs together."""
        return (self.rollout_gpus + self.training_gpus) * self.step


def fastest_split(load: StepLoad, gpus: int, *, server_gpus: int = 1, sharing: int = 1) -> Split:
    """The split of all GPUs with the shortest step; of equal ones, that with most GPUs in training.

    Args:
        server_gpus: GPUs of one rollout server.
        sharing: GPUs that share the tokens of a rank of the trainer.

    Raises:
        ValueError: no split gives both sides whole servers and ranks.
    """
    splits = [
        Split(load=load, rollout_gpus=rollout, training_gpus=gpus - rollout)
        for rollout in range(server_gpus, gpus, server_gpus)
        if (gpus - rollout) % sharing == 0
    ]
    if not splits:
        raise ValueError(
            f"{gpus}: expected GPUs for rollout servers ({server_gpus} each) and training ranks ({sharing} each)"
        )
    return min(splits, key=lambda split: split.step)


def seconds_in_turns(load: StepLoad, gpus: int) -> float:
    """Seconds of a step whose rollout and training take turns on all GPUs (`tree_sync`)."""
    return (load.rollout + load.training) / gpus + load.weights


def _idle(busy: float, step: float) -> float:
    return 1 - busy / step if step else 0.0
