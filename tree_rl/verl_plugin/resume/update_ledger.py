"""The ledger of updates: the rows that trained the weights, one JSON line per group and update.

A checkpoint contains a copy, from which a restart continues, so the ledger has every trained row once.
"""

import json
import logging
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import numpy as np

from tree_rl.verl_plugin.resume.checkpoint_record import write_atomically
from tree_rl.verl_plugin.resume.file_marks import read_regular
from tree_rl.verl_plugin.resume.row_names import uid_of_row

logger = logging.getLogger(__name__)

LEDGER = "updates.jsonl"


def record_update(
    root: Path, step: int, update: int, row_tokens: Mapping[str, np.ndarray], index_of_uid: Mapping[str, int | str]
) -> None:
    """Append the groups of one update to the ledger.

    A line has step, update (its index in the step), uid and `extra_info.index` of the prompt, number of rows without
    padding, and a digest of the rows' keys and tokens. `row_tokens` has int64 ids by verl's `{uid}_{session}_{index}`.
    """
    keys_of_uid: dict[str, list[str]] = {}
    for key in sorted(row_tokens):
        keys_of_uid.setdefault(uid_of_row(key), []).append(key)
    root.mkdir(parents=True, exist_ok=True)
    with (root / LEDGER).open("a") as stream:
        for uid, keys in keys_of_uid.items():
            digest = blake2b(digest_size=12)
            for key in keys:
                digest.update(key.encode() + np.ascontiguousarray(row_tokens[key], dtype=np.int64).tobytes())
            group = {"step": step, "update": update, "uid": uid, "index": index_of_uid[uid], "rows": len(keys)}
            # Data sets may number their prompts with NumPy's integers.
            line = json.dumps({**group, "digest": digest.hexdigest()}, default=lambda number: number.item())
            stream.write(line + "\n")


def save_ledger(root: Path, checkpoint: Path) -> None:
    """Copy the ledger into the folder of a checkpoint."""
    path = root / LEDGER
    (checkpoint / LEDGER).write_bytes(path.read_bytes() if path.exists() else b"")


def restore_ledger(root: Path, step: int, checkpoint: Path | None) -> None:
    """Remove updates after `step`, from which training continues, and damaged or incomplete lines, from the ledger.

    Takes the copy in the folder of the step's checkpoint; None at a start from the beginning. Raises a ValueError if
    the ledger cannot be written.
    """
    path = root / LEDGER
    saved = None if checkpoint is None else checkpoint / LEDGER
    content, reason = read_regular(path)
    there, problem = content or b"", reason and f"cannot be read ({reason})"
    if saved is not None and saved.is_file():
        content = saved.read_bytes()
        if not there.startswith(content):
            problem = problem or "does not hold the updates until then"
            logger.warning("%s %s; taking the copy in %s", path, problem, saved)
    else:
        lines = [(line, _step_of(line)) for line in there.splitlines(keepends=True)]
        damaged = sum(found is None and line.endswith(b"\n") for line, found in lines)
        if problem or damaged:
            logger.warning("%s %s; leaving it out", path, problem or f"has {damaged} damaged lines")
        content = b"".join(line for line, found in lines if found is not None and found <= step)
    if content == there and not problem:
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise ValueError(
            f"trainer.default_local_dir={root}: {path} cannot be written: {error.strerror}; expected a folder that the "
            "trainer may write"
        ) from error


def _step_of(line: bytes) -> int | None:
    """The step of a line of the ledger; None if the line is incomplete or damaged."""
    try:
        entries = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    step = entries.get("step") if isinstance(entries, dict) else None
    return step if isinstance(step, int) else None
