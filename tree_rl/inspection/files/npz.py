"""Columns of a `trajectory.npz`, which uni-agent writes for each session: three arrays per trajectory."""

import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.open_file import open_regular
from tree_rl.inspection.files.quoting import escaped, quoted_names, quoted_path

COLUMNS = ("prompt_ids", "response_ids", "response_mask")
FIRST = re.compile(r"traj(\d+)_prompt_ids")

SESSION = re.compile(r"(session-sample-\d+)-rollout-\d+-[0-9a-f]+")
"""Name of a session's folder, inside the folder of its step."""


def group_of_session(path: Path) -> Path:
    """Group of a session's file: sessions of one step and one sample; a folder with another name is its own group."""
    folder = path.absolute().parent
    found = SESSION.fullmatch(folder.name)
    return folder.parent / found[1] if found else folder


def read_npz(path: Path) -> dict[str, list[Any]]:
    """Token ids and masks of the trajectories, in order; raises an `InputError` for any other content."""
    try:
        with open_regular(path) as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array")
            numbers = sorted(int(found[1]) for found in map(FIRST.fullmatch, file.files) if found)
            if not numbers:
                raise RowFileError(
                    f"{quoted_path(path)}: expected arrays traj0_prompt_ids and so on, as uni-agent writes them; "
                    f"received {quoted_names(file.files)}"
                )
            return {name: [file[f"traj{number}_{name}"].tolist() for number in numbers] for name in COLUMNS}
    except RowFileError:
        raise
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise RowFileError(
            f"{quoted_path(path)}: expected a trajectory.npz of uni-agent: {escaped(str(error), 120)}; write or copy "
            "it again"
        ) from error
