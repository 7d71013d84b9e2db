"""Argument checks that several operations share. Each error says what was expected and what was received."""

import torch

from tree_kernels.accumulation import accumulation_dtype
from tree_kernels.tree_layout import TreeLayout


def check_one_device(op: str, layout: TreeLayout, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all tensors and the layout are on one device."""
    given = {name: t.device for name, t in tensors.items() if t is not None}
    if len({*given.values(), layout.device}) > 1:
        received = ", ".join(f"{name} on {device}" for name, device in given.items())
        raise ValueError(
            f"{op}: expected one device, received {received}, layout on {layout.device}; use layout.to(device)"
        )


def check_heads(op: str, heads: int, groups: int, names: tuple[str, str]) -> None:
    """Raise ValueError unless the number of heads is a multiple of the number of groups (key heads)."""
    if groups == 0 or heads % groups:
        received = f"{names[0]}={heads}, {names[1]}={groups}"
        raise ValueError(f"{op}: expected {names[0]} to be a multiple of {names[1]}, received {received}")


def check_tokens(op: str, argument: str, tokens: tuple[int, ...] | None, num_tokens: int) -> tuple[int, ...]:
    """Check the tokens that the caller asks about; None gives ().

    Raises:
        ValueError: one of them is not in [0, num_tokens).
    """
    for token in tokens or ():
        if not 0 <= token < num_tokens:
            raise ValueError(f"{op}: {argument}: expected tokens in [0, {num_tokens}), received {token}")
    return tokens or ()


def initial_state_or_zeros(
    op: str, state: torch.Tensor | None, like: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor:
    """The state before the roots, zeros if `state` is None, in the accumulation dtype of the input `like`.

    Raises:
        ValueError: the state has another shape or dtype.
    """
    dtype = accumulation_dtype(like.dtype)
    if state is None:
        return torch.zeros(shape, dtype=dtype, device=like.device)
    if state.shape != shape or state.dtype != dtype:
        raise ValueError(
            f"{op}: expected initial_state {shape} in {dtype}, received {tuple(state.shape)} in {state.dtype}"
        )
    return state
