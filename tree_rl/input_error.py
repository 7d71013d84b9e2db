"""The error for unusable input of the user."""


class InputError(ValueError):
    """A file, an option or an output cannot be used; the message says on one line what to do."""
