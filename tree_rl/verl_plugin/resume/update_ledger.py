"""The ledger of updates: which rows trained the weights, one JSON line per group and update.

A restart cuts it back to the checkpoint, as it does the weights, so every trained row stands in it once.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import numpy as np

from tree_rl.verl_plugin.resume.checkpoint_commit import write_atomically
from tree_rl.verl_plugin.resume.row_names import uid_of_row

LEDGER = "updates.jsonl"


def record_update(
    root: Path, step: int, update: int, row_tokens: Mapping[str, np.ndarray], index_of_uid: Mapping[str, int | str]
) -> None:
    """Append the groups of one update to the ledger in `trainer.default_local_dir`, which is created if needed.

    A line holds step, update, uid and `extra_info.index` of the prompt, number of rows without padding, and a digest of
    the rows' keys and tokens.

    Args:
        root: that folder.
        step: global step.
        update: index within the step.
        row_tokens: verl's row key `{uid}_{session}_{index}` -> int64 token ids.
        index_of_uid: index of each prompt in the data set.
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
            stream.write(json.dumps({**group, "digest": digest.hexdigest()}) + "\n")


def cut_ledger(root: Path, step: int) -> None:
    """Remove the updates after the step that training continues from, and a line that a kill left unfinished."""
    path = root / LEDGER
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    write_atomically(path, "".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step))
