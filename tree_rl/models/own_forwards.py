"""transformers' own forward of a class, also after another library has put its own in that place.

verl replaces forwards of whole classes where a model also reads images, in every model of the process: attention that
goes around transformers' attention interface, mixers that call other functions. Trees read the model as published.
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
    """The forward that a class was defined with; of classes outside transformers, the one it has now.

    Args:
        cls: class of a module.
    """
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    forward: Callable[..., Any] = vars(owner)["forward"]
    if not _is_replaced(owner, forward):
        return forward
    published: Callable[..., Any] = vars(vars(_as_published(owner.__module__))[owner.__name__])["forward"]
    return published


def restore_own_forwards(model: nn.Module) -> None:
    """Give modules whose class's forward was replaced the forward that the class was defined with; other models of the
    process, and what this model's modules themselves were given, stay as they are.

    Args:
        model: before FSDP wraps it.
    """
    for module in model.modules():
        forward = own_forward(type(module))
        if "forward" not in vars(module) and forward is not type(module).forward:
            vars(module)["forward"] = MethodType(forward, module)


def _is_replaced(owner: type[nn.Module], forward: Callable[..., Any]) -> bool:
    return owner.__module__.startswith(TRANSFORMERS) and forward.__module__ != owner.__module__


@cache
def _as_published(name: str) -> ModuleType:
    """A second copy of a modelling file, whose classes nobody has changed; it is not registered as a module."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None, f"{name} is in {sys.modules[name].__file__}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
