"""Chooses the checkpoint from which training resumes: the newest whole one, whatever has happened to the others.

The trainer chooses for all ranks, and verl loads the checkpoint in its tracker.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from tree_rl.verl_plugin.resume.checkpoint_commit import TRACKER, folder_of_step, steps_in
from tree_rl.verl_plugin.resume.checkpoint_record import DamagedCheckpointError, Record, read_record, write_atomically
from tree_rl.verl_plugin.resume.file_marks import read_regular

logger = logging.getLogger(__name__)

FindDamage = Callable[[Path, Record | None], str | None]
"""(folder, record or None for stock verl's) of a checkpoint -> its damage, which names a file, or None."""
REMEDY = (
    "Restore one of them, or set trainer.default_local_dir to another folder, or start from the beginning with "
    "trainer.resume_mode=disable"
)


def choose_checkpoint(root: Path, find_damage: FindDamage) -> int | None:
    """Step of the newest whole checkpoint in `root`, `trainer.default_local_dir`, which verl's tracker then names.

    Logs a warning with a damaged file for every damaged checkpoint. Reads checkpoints from the newest to the chosen
    one. If no checkpoint was ever whole, deletes the tracker.

    Raises:
        ValueError: there were whole checkpoints but all are damaged, or the folder cannot be read or written.
    """
    if not root.exists():
        return None
    try:
        chosen, interrupted, damaged = _newest_whole(root, find_damage)
        text = _tracker_text(root / TRACKER)
        if chosen is None:
            _refuse_to_start_over(root, text, interrupted, damaged)
            if text is not None:
                logger.warning("%s names no whole checkpoint; training starts from the beginning", root / TRACKER)
                (root / TRACKER).unlink()
        elif text != str(chosen):
            problem = "is missing" if text is None else f"holds {text!r:.60}"
            newest = f"step {chosen}, the newest whole checkpoint"
            logger.warning("%s %s; resuming from %s", root / TRACKER, problem, newest)
            write_atomically(root / TRACKER, str(chosen).encode())
    except OSError as error:
        raise ValueError(
            f"trainer.default_local_dir={root}: cannot look for a checkpoint to resume from, as {error.filename} gave "
            f"{error.strerror!r}; expected a folder that the trainer may read and write"
        ) from error
    return chosen


def _newest_whole(root: Path, find_damage: FindDamage) -> tuple[int | None, list[int], dict[int, str]]:
    """The step; newer ones whose writing was interrupted, which never counted; damage of newer ones, once whole."""
    interrupted, damaged = list[int](), dict[int, str]()
    for step in reversed(steps_in(root)):
        folder = folder_of_step(root, step)
        try:
            record = read_record(folder)
            if record is not None and not record.is_whole:
                logger.warning("%s: its writing was interrupted; it never counted", folder)
                interrupted.append(step)
                continue
            reason = find_damage(folder, record)
        except DamagedCheckpointError as error:
            reason = str(error)
        if reason is None:
            return step, interrupted, damaged
        logger.warning("the checkpoint of step %d is damaged: %s; trying the one before", step, reason)
        damaged[step] = reason
    return None, interrupted, damaged


def _refuse_to_start_over(root: Path, tracker: str | None, interrupted: list[int], damaged: Mapping[int, str]) -> None:
    """Raise a ValueError if a checkpoint was whole once, instead of silently starting training again."""
    found = [f"step {step}: {reason}" for step, reason in damaged.items()]
    # After a kill during the first save, the tracker is empty or names the interrupted step.
    explained = {"", *map(str, interrupted)} if interrupted else set()
    if tracker is not None and tracker not in explained:
        found.append(f"{root / TRACKER} holds {tracker!r:.60}, and no such checkpoint is there")
    if found:
        raise ValueError(
            f"trainer.default_local_dir={root}, trainer.resume_mode=auto: no checkpoint is whole. Tried: "
            f"{'; '.join(found)}. {REMEDY}"
        )


def _tracker_text(path: Path) -> str | None:
    """Content of the tracker; None if there is none, and the error's text if it cannot be read."""
    content, reason = read_regular(path)
    if reason is not None:
        return f"<{reason}>"
    return None if content is None else content[:100].decode("ascii", errors="backslashreplace").strip()
