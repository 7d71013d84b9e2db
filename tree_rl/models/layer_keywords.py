"""Passes the keywords of a forward over a tree on to decoder layers whose model drops them (Falcon-H1)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from tree_rl.models import sequence_parallel, tiled_mlp

DROPPED_BY = frozenset({"FalconH1Model"})
"""Decoder stacks that call their layers without the keywords they were given."""
KEYWORDS = ("tree_layout", "kv_relay", sequence_parallel.KEYWORD, tiled_mlp.KEYWORD)


def pass_keywords_to_layers(model: nn.Module) -> None:
    """Let the layers of `model` get the keywords of a forward over a tree, if its own forward drops them."""
    for stack in model.modules():
        if type(stack).__name__ in DROPPED_BY:
            stack.register_forward_pre_hook(_enter, with_kwargs=True)
            stack.register_forward_hook(_leave, always_call=True)


def _enter(stack: Any, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
    given = {name: kwargs[name] for name in KEYWORDS if kwargs.get(name) is not None}
    if "tree_layout" in given:
        called: list[Callable[..., Any]] = [partial(layer, **given) for layer in stack.layers]
        # Hides the module list; a layer's checkpoint keeps the keywords for the recomputation.
        vars(stack)["layers"] = called


def _leave(stack: Any, args: tuple[object, ...], output: object) -> None:
    vars(stack).pop("layers", None)
