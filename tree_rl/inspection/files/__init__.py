"""Files of a user: read safely, written whole, and shown on one line.

Each error's message says on one line what was expected, what came and what to do.
"""

from tree_rl.tree import RowError


class InputError(ValueError):
    """A file, an option or an output that cannot be used."""


class RowFileError(InputError, RowError):
    """A file without usable rows; the message names the file, the row and the column."""
