"""Finds transformers' original forward of a class after another library has replaced it.

For multimodal models verl replaces forwards of whole classes, in every model of the process: attention that bypasses
transformers' attention interface, mixers that call other functions. Trees need the original forwards.
"""

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from types import MethodType, ModuleType
from typing import Any

from torch import nn

TRANSFORMERS = "transformers.models."


def own_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """The forward that a class was defined with; for classes outside transformers, the current one."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    forward: Callable[..., Any] = vars(owner)["forward"]
    if not owner.__module__.startswith(TRANSFORMERS) or forward.__module__ == owner.__module__:
        return forward
    published: Callable[..., Any] = vars(vars(_as_published(owner.__module__))[owner.__name__])["forward"]
    return published


def restore_own_forwards(model: nn.Module) -> None:
    """Restore the original forward on this model's modules if their class's forward was replaced.

    Other models of the process, and forwards set on a module itself, do not change.

    Args:
        model: before FSDP wraps it.
    """
    for module in model.modules():
        forward = own_forward(type(module))
        if "forward" not in vars(module) and forward is not type(module).forward:
            vars(module)["forward"] = MethodType(forward, module)


@cache
def _as_published(name: str) -> ModuleType:
    """A fresh import of a modelling module, with its original classes, that is not registered in `sys.modules`."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None, f"{name} is in {sys.modules[name].__file__}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
