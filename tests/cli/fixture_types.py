"""Types of the fixtures that run a command in this process."""

from collections.abc import Callable

Run = Callable[..., tuple[int, str, str]]
Printed = Callable[..., str]
Refused = Callable[..., None]
