"""Notice a dead process of the job, so that the job ends instead of waiting for rows that nobody makes any more.

verl polls its queue for finished prompts and would poll for ever; rows that a dead process took along would be left out
of the update in silence. Here their owner is named and training stops before it updates.
"""

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

BUSY_SECONDS = 2.0
"""A process that has not answered for this long, but can be reached, is at work."""
UNREACHABLE_SECONDS = 30.0
"""A process that Ray cannot reach for this long counts as dead."""


class WorkerDiedError(RuntimeError):
    """A process of the job is gone."""


class Watch:
    """Asks actors now and then whether they are there.

    Args:
        actors: what each is, for the message -> its handle.
    """

    def __init__(self, actors: Mapping[str, Any]) -> None:
        self.actors = dict(actors)
        self._asked: dict[str, Any] = {}

    def look(self) -> None:
        """Read the answers that came since the last look, and ask again; returns at once.

        Raises:
            WorkerDiedError: an actor is dead; it is named.
        """
        for name in self._answered(timeout_seconds=0):
            self._read(name)

    def confirm(self) -> None:
        """Make sure that nobody has died until now; waits for the answers, though not long for a busy actor's.

        Raises:
            WorkerDiedError: an actor is dead, or could not be reached; it is named.
        """
        started = time.monotonic()
        self._asked.clear()
        unheard = set(self.actors)
        unreachable: set[str] = set()
        while unreachable or (unheard and time.monotonic() < started + BUSY_SECONDS):
            for name in self._answered(timeout_seconds=0.5):
                reached = self._read(name)
                unheard.discard(name)
                unreachable = unreachable - {name} if reached else unreachable | {name}
            if unreachable and time.monotonic() > started + UNREACHABLE_SECONDS:
                raise WorkerDiedError(_message(min(unreachable), f"not reachable for {UNREACHABLE_SECONDS:.0f} s"))

    def _answered(self, timeout_seconds: float) -> list[str]:
        for name, actor in self.actors.items():
            if name not in self._asked:
                self._asked[name] = actor.__ray_ready__.remote()
        name_of_answer = {answer: name for name, answer in self._asked.items()}
        if not name_of_answer:
            return []
        ready, _ = ray.wait(list(name_of_answer), num_returns=len(name_of_answer), timeout=timeout_seconds)
        return [name_of_answer[answer] for answer in ready]

    def _read(self, name: str) -> bool:
        """Whether the actor answered; False if Ray could not reach it for now."""
        try:
            ray.get(self._asked.pop(name))
        except ActorUnavailableError:
            return False
        except RayActorError as error:
            raise WorkerDiedError(_message(name, str(error).splitlines()[0])) from error
        return True


def _message(name: str, cause: str) -> str:
    return (
        f"{name} died ({cause}). The job ends here, before it trains on what is left; start it again with the same "
        "command: trainer.resume_mode=auto goes on from the last checkpoint of trainer.default_local_dir"
    )
