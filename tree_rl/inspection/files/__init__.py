"""Files of a user: read safely, written whole, and shown on one line."""

from tree_rl.inspection.files.errors import InputError, RowFileError

__all__ = ["InputError", "RowFileError"]
