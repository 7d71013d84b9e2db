"""Notice a dead process of the job, so that the job ends instead of waiting for what nobody makes any more.

verl polls its queue, and calls it and the ranks, without a limit of time; rows that a dead process took along would be
left out of an update in silence. Here the process is named, and the job ends before it trains.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Time between two looks."""
BUSY_SECONDS = 2.0
"""A process that has not answered for this long, but can be reached, is at work."""
UNREACHABLE_SECONDS = 30.0
"""A process that Ray cannot reach for this long counts as dead."""
GRACE_SECONDS = 20.0
"""How long the trainer may take to end by itself, once somebody has died."""


class WorkerDiedError(RuntimeError):
    """A process of the job is gone."""


class Watch:
    """Knows who has died.

    Args:
        actors: what each is, for the message -> its handle.
    """

    def __init__(self, actors: Mapping[str, Any]) -> None:
        self.actors = dict(actors)
        self._death: WorkerDiedError | None = None

    def check(self) -> None:
        """Return at once.

        Raises:
            WorkerDiedError: a death that `guard` has noticed.
        """
        if self._death is not None:
            raise self._death

    def confirm(self) -> None:
        """Make sure that nobody has died until now; waits for the answers, though not long for a busy actor's.

        Raises:
            WorkerDiedError: an actor is dead, or could not be reached; it is named.
        """
        started = time.monotonic()
        asked: dict[str, Any] = {}
        unheard = set(self.actors)
        unreachable: set[str] = set()
        while unreachable or (unheard and time.monotonic() < started + BUSY_SECONDS):
            for name, is_reached in self._answers(asked, timeout_seconds=0.5):
                unheard.discard(name)
                unreachable = unreachable - {name} if is_reached else unreachable | {name}
            if unreachable and time.monotonic() > started + UNREACHABLE_SECONDS:
                raise WorkerDiedError(_message(min(unreachable), f"not reachable for {UNREACHABLE_SECONDS:.0f} s"))

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Look around while the block runs; if somebody dies and the process hangs because of it, end the process.

        An error in the block leaves the guard on duty: what cleans up after it may wait for the dead, too.
        """
        is_done = threading.Event()
        threading.Thread(target=self._stand_guard, args=(is_done,), name="watch", daemon=True).start()
        yield
        is_done.set()

    def _stand_guard(self, is_done: threading.Event) -> None:
        asked: dict[str, Any] = {}
        while not is_done.wait(LOOK_SECONDS):
            try:
                for _ in self._answers(asked, timeout_seconds=0):
                    pass
            except WorkerDiedError as error:
                self._death = error
                logger.error("%s", error)
                break
        if self._death is not None and not is_done.wait(GRACE_SECONDS):
            logger.error("the trainer waits for the dead; ending it")
            logging.shutdown()
            os._exit(1)

    def _answers(self, asked: dict[str, Any], *, timeout_seconds: float) -> Iterator[tuple[str, bool]]:
        """Ask whoever is not asked yet; who has answered since, and whether Ray could reach it."""
        for name, actor in self.actors.items():
            if name not in asked:
                asked[name] = actor.__ray_ready__.remote()
        name_of_answer = {answer: name for name, answer in asked.items()}
        if not name_of_answer:
            return
        ready, _ = ray.wait(list(name_of_answer), num_returns=len(name_of_answer), timeout=timeout_seconds)
        for answer in ready:
            name = name_of_answer[answer]
            del asked[name]
            try:
                ray.get(answer)
            except ActorUnavailableError:
                yield name, False
            except RayActorError as error:
                raise WorkerDiedError(_message(name, str(error).splitlines()[0])) from error
            else:
                yield name, True


def _message(name: str, cause: str) -> str:
    return (
        f"{name} died ({cause}). The job ends here, before it trains on what is left; start it again with the same "
        "command: trainer.resume_mode=auto goes on from the last checkpoint of trainer.default_local_dir"
    )
