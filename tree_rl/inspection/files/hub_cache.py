"""Finds files of models in the local Hugging Face cache by an id such as Qwen/Qwen3-8B. Downloads nothing."""

import os
import re
from pathlib import Path

from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.quoting import quoted

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def folder_of(named: Path, option: str, *wanted: str) -> Path:
    """The folder that a path or a Hub id names; an existing path, or one that is no id, is returned unchanged.

    The cache is searched for the first of the files `wanted`. Raises an InputError that names the `option`, and says
    how to download an id that is not there.
    """
    identity = str(named)
    if os.path.exists(named) or not HUB_ID.fullmatch(identity) or identity.startswith(".") or named.suffix == ".json":
        return named
    # Imported here: it takes a third of a second, and paths do not need it.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(identity, wanted[0])
    except HFValidationError:
        return named
    if isinstance(found, str):
        return Path(found).parent
    raise InputError(
        f"{option} {quoted(identity)}: no such folder, and the local Hugging Face cache has no {wanted[0]} of this id; "
        f"download it: hf download {quoted(identity)} {' '.join(wanted)}"
    )
