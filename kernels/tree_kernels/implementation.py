"""Choice among an operation's implementations. One that cannot run says why; nothing is replaced silently."""

from collections.abc import Callable
from typing import Any


class UnsupportedImplementation(ValueError):  # noqa: N818 - it names a state of the caller's choice, as NotImplemented does
    """The requested implementation cannot run this problem. The message says why and what to use instead."""

    def __init__(self, op: str, impl: str, reason: str) -> None:
        super().__init__(f'{op}: impl="{impl}" cannot run here: {reason}. Use impl="auto" or another implementation.')
        self.op = op
        self.impl = impl
        self.reason = reason


def check_implementation(impl: str, implementations: tuple[str, ...]) -> None:
    """Raise ValueError unless `impl` is one of `implementations`; "auto" must already be resolved."""
    if impl not in implementations:
        raise ValueError(f"impl: expected one of {('auto', *implementations)}, received {impl!r}")


def implementation_to_run(
    op: str, impl: str, choose: Callable[..., str], refuse: Callable[..., str | None], **problem: Any
) -> str:
    """Resolve "auto" and check that the implementation can run.

    `choose` and `refuse` are the operation's `chosen_implementation` and `unavailable_reason`; `problem` holds their
    arguments: device, dtype, sizes.

    Raises:
        ValueError: there is no implementation of that name.
        UnsupportedImplementation: it cannot run this problem.
    """
    if impl == "auto":
        impl = choose(**problem)
    reason = refuse(impl, **problem)
    if reason is not None:
        raise UnsupportedImplementation(op, impl, reason)
    return impl
