"""Detects that a process of the job has died, names it and ends the job before it trains on the remaining rows.

verl polls its queue and calls the ranks without a time limit, so it would wait for a dead process forever, or silently
train without its rows.
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
"""Time between two checks."""
BUSY_SECONDS = 2.0
"""Time without an answer after which `confirm` considers an actor busy."""
UNREACHABLE_SECONDS = 30.0
"""Time after which an actor that Ray cannot reach counts as dead."""
GRACE_SECONDS = 20.0
"""Longest wait for the trainer to end by itself after a death."""


class WorkerDiedError(RuntimeError):
    """A process of the job has died."""


class Watch:
    """Detects dead actors among `actors`, handles by name."""

    def __init__(self, actors: Mapping[str, Any]) -> None:
        self.actors = dict(actors)
        self._death: WorkerDiedError | None = None
        self._is_ending = False

    def check(self) -> None:
        """Raise the WorkerDiedError if `guard` has detected a death; does not wait."""
        if self._death is not None:
            raise self._death

    def confirm(self) -> None:
        """Raise a WorkerDiedError if an actor is dead or unreachable; does not wait long for a busy one."""
        started = time.monotonic()
        asked: dict[str, Any] = {}
        silent = set(self.actors)
        unreachable: set[str] = set()
        while unreachable or (silent and time.monotonic() < started + BUSY_SECONDS):
            for name, is_reached in self._answers(asked, timeout_seconds=0.5):
                silent.discard(name)
                unreachable = unreachable - {name} if is_reached else unreachable | {name}
            if unreachable and time.monotonic() > started + UNREACHABLE_SECONDS:
                raise WorkerDiedError(_message(min(unreachable), f"not reachable for {UNREACHABLE_SECONDS:.0f} s"))

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Check the actors while the block runs; end this process if it hangs after a death.

        Continues after an error in the block, because the clean-up may also wait for the dead actor. If all actors live
        when the block raises, they die of the error, and their deaths are not logged.
        """
        is_done = threading.Event()
        threading.Thread(target=self._look_repeatedly, args=(is_done,), name="watch", daemon=True).start()
        try:
            yield
        except Exception:
            self.confirm()
            self._is_ending = True
            raise
        is_done.set()

    def _look_repeatedly(self, is_done: threading.Event) -> None:
        asked: dict[str, Any] = {}
        while not is_done.wait(LOOK_SECONDS):
            try:
                for _ in self._answers(asked, timeout_seconds=0):
                    pass
            except WorkerDiedError as error:
                self._death = error
                if not self._is_ending:
                    logger.error("%s", error)
                break
        if self._death is not None and not is_done.wait(GRACE_SECONDS):
            logger.error("the trainer still waits for the dead process; ending the trainer")
            logging.shutdown()
            os._exit(1)

    def _answers(self, asked: dict[str, Any], *, timeout_seconds: float) -> Iterator[tuple[str, bool]]:
        """Ask the actors without a pending request; yield each that answered, and True if Ray could reach it."""
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
