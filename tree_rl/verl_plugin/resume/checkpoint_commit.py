"""Records which of verl's checkpoints are whole; training never resumes from a half-written one.

A checkpoint is whole once it has a record of its files, written after all of them and renamed into place. verl itself
relies on `latest_checkpointed_iteration.txt`, which it writes in place: a kill can leave it empty.
"""

import json
import logging
import os
import re
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
RECORD = "tree_checkpoint.json"
FOLDER = re.compile(r"global_step_(\d+)")


def write_atomically(path: Path, text: str) -> None:
    """Replace a file: a reader sees the old text or the new one, even after a kill."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def begin_checkpoint(root: Path, step: int) -> Path:
    """Mark a checkpoint in `root`, `trainer.default_local_dir`, as unfinished; return its folder."""
    folder = root / f"global_step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RECORD, json.dumps({"is_whole": False}))
    return folder


def commit_checkpoint(root: Path, step: int) -> None:
    """Record the files of a checkpoint with their sizes; from now on it counts as whole."""
    folder = root / f"global_step_{step}"
    files = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != RECORD
    }
    write_atomically(folder / RECORD, json.dumps({"is_whole": True, "files": files}, indent=1))


def why_not_whole(folder: Path) -> str | None:
    """What a checkpoint lacks; None if it is whole.

    Stock verl writes no record: a folder without one counts as whole.
    """
    if not folder.is_dir():
        return "the folder does not exist"
    if not (folder / RECORD).exists():
        return None
    record = json.loads((folder / RECORD).read_text())
    if not record["is_whole"]:
        return "its writing was interrupted"
    for name, size in record["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is {path.stat().st_size if path.is_file() else 'missing'}, expected {size} bytes"
    return None


def refuse_damaged(folder: Path) -> None:
    """Raise a ValueError if the checkpoint that `trainer.resume_from_path` names is not whole."""
    reason = why_not_whole(folder)
    if reason is not None:
        raise ValueError(
            f"trainer.resume_from_path={folder}: {reason}; expected a whole checkpoint. Name another one, or set "
            "trainer.resume_mode=auto, which takes the newest whole one"
        )


def repair_tracker(root: Path) -> int | None:
    """Make verl's tracker in `root` name a whole checkpoint: the one it names if that is whole, else the newest.

    Return the step to resume from; None, and no tracker, if no checkpoint is whole.
    """
    tracker = root / TRACKER
    if not root.is_dir():
        return None
    text = tracker.read_text().strip() if tracker.exists() else ""
    problem = f"it holds {text!r}" if tracker.exists() else "it does not exist"
    if text.isdigit():
        reason = why_not_whole(root / f"global_step_{text}")
        if reason is None:
            return int(text)
        problem = f"it names step {text}, but {reason}"
    whole = _whole_steps(root)
    if not whole:
        if tracker.exists():
            logger.warning("%s: %s, and no checkpoint is whole; training starts from the beginning", tracker, problem)
            tracker.unlink()
        return None
    step = whole[-1]
    logger.warning("%s: %s; resuming from step %d, the newest whole checkpoint", tracker, problem, step)
    write_atomically(tracker, str(step))
    return step


def remove_old_checkpoints(root: Path, keep: int) -> None:
    """Keep the newest `keep` whole checkpoints. Unlike verl, count those of earlier starts of this run too."""
    for step in _whole_steps(root)[:-keep]:
        shutil.rmtree(begin_checkpoint(root, step))


def _whole_steps(root: Path) -> list[int]:
    """Steps of whole checkpoints with a record, in rising order."""
    found = [(FOLDER.fullmatch(path.name), path) for path in root.iterdir()]
    return sorted(
        int(match[1]) for match, path in found if match and (path / RECORD).exists() and why_not_whole(path) is None
    )
