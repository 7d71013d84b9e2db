"""Finds the sliding window that transformers' own mask gives each attention layer.

A layer may take its window from the mask alone (Qwen2-MoE), or name one that the mask does not have (OLMoE). So the
decoder stack runs on two tokens with its layers stubbed, and every mask that it builds is a number, the window. Only
embeddings and rotary angles are computed, so this also works on meta tensors.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from tree_rl.models.language_model import language_model
from tree_rl.models.own_forwards import own_forward
from tree_rl.models.stubs import attention_named, stubbed

PROBE = "tree_rl_probe"
"""Name of the attention implementation whose masks are numbers."""
NO_WINDOW, OTHER = 0, -1
"""Numbers of a causal mask, and of one that is neither causal nor sliding."""


def find_stock_windows(model: nn.Module) -> dict[nn.Module, int | None] | str:
    """The window in the mask of each attention module, None if the mask is causal; or the reason why it is unknown.

    Args:
        model: a Hugging Face model, before FSDP or PEFT wrap it.
    """
    stack: Any = language_model(model).base_model
    layers = _layers(stack)
    if not layers:
        return {}
    seen: dict[nn.Module, set[int]] = {layer: set() for layer in layers if _attention(layer)}
    stubs: dict[nn.Module, Callable[..., Any]] = {layer: partial(_read, seen, layer) for layer in layers}
    stubs[stack] = MethodType(own_forward(type(stack)), stack)
    device = next(stack.parameters()).device
    try:
        with stubbed(stubs), attention_named(PROBE, stack.config), torch.no_grad():
            stack.forward(
                input_ids=torch.zeros(1, 2, dtype=torch.long, device=device),
                position_ids=torch.arange(2, device=device)[None],
                # Some stacks read its values, which a meta tensor does not have.
                attention_mask=torch.ones(1, 2, dtype=torch.long, device="cpu" if device.type == "meta" else device),
                use_cache=False,
            )
    except _AllSeenError:
        pass
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"its masks could not be probed ({type(error).__name__}: {error})"
    odd = [type(layer).__name__ for layer, windows in seen.items() if len(windows) != 1 or OTHER in windows]
    if odd:
        return f"the mask of its {odd[0]} is neither causal nor sliding"
    return {module: max(windows) or None for layer, windows in seen.items() for module in _attention(layer)}


class _AllSeenError(Exception):
    """Every layer got its mask; what comes behind the layers does not matter."""


class _Hidden(torch.Tensor):
    """Hidden states that are also the first entry of the tuples that some layers return."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self, None))

    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, int) and index == 0 else super().__getitem__(index)


class _Mask(torch.Tensor):
    """A window, with the shape [1, 1, 1, 1]."""


def _layers(stack: nn.Module) -> list[nn.Module]:
    """The decoder layers, outermost modules of lists in which some have attention."""
    lists = [module for module in stack.modules() if isinstance(module, nn.ModuleList) and _attention(module)]
    layers = {layer: None for one in lists for layer in one}
    inner = {part for layer in layers for part in layer.modules() if part is not layer}
    return [layer for layer in layers if layer not in inner]


def _attention(layer: nn.Module) -> list[nn.Module]:
    return [module for module in layer.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")]


def _read(seen: dict[nn.Module, set[int]], layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Forward of a stubbed layer: keeps the window of its mask."""
    if layer in seen:
        seen[layer] |= {int(given) for given in (*args, *kwargs.values()) if isinstance(given, _Mask)}
    if all(seen.values()):
        raise _AllSeenError
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden.as_subclass(_Hidden)


def _as_number(*, mask_function: Callable[..., torch.Tensor], local_size: int = NO_WINDOW, **_: Any) -> torch.Tensor:
    """Implements transformers' mask interface: checks which keys one late query sees."""
    query = 2 * local_size + 1
    keys = torch.arange(query + 2)
    first = query - local_size + 1 if local_size else 0
    try:
        sees = mask_function(0, 0, torch.tensor(query), keys)
        is_known = torch.equal(sees.expand_as(keys), (keys <= query) & (keys >= first))
    except IndexError:
        is_known = False
    return torch.full((1, 1, 1, 1), local_size if is_known else OTHER).as_subclass(_Mask)


ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, _as_number)
