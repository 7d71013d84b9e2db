"""Every op is a family of implementations; one that cannot run says why, nothing falls back silently."""


class UnsupportedImplementation(ValueError):  # noqa: N818 - it names a state of the caller's choice, as NotImplemented does
    """The implementation asked for by name cannot run this problem; the message says why and what can."""

    def __init__(self, op: str, impl: str, reason: str) -> None:
        super().__init__(f'{op}: impl="{impl}" cannot run here: {reason}. Use impl="auto" or another implementation.')
        self.op = op
        self.impl = impl
        self.reason = reason
