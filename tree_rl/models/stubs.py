"""Replaces forwards of modules, or the attention of configs, for a while."""

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


@contextmanager
def attention_named(name: str, *configs: Any) -> Iterator[None]:
    """Temporarily put the name of an attention implementation in configs.

    Not by their public property, which would also change every sub-configuration.
    """
    kept = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, was in zip(configs, kept, strict=True):
            config._attn_implementation_internal = was
