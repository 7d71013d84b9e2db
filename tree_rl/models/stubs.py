"""Replaces forwards of modules for a while, to see what a model does around them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def stubbed(stubs: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Temporarily replace the forwards of modules."""
    kept = {module: vars(module).get("forward") for module in stubs}
    for module, forward in stubs.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, was in kept.items():
            if was is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = was
