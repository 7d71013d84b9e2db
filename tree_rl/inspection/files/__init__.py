"""Files of a user: read safely, written atomically, and quoted on one line.

Each error message says on one line what was expected, what was received and what to do.
"""

from tree_rl.tree import RowError


class InputError(ValueError):
    """An input file, an option or an output that cannot be used."""


class RowFileError(InputError, RowError):
    """A file without usable rows; the message names the file, the row and the column."""
