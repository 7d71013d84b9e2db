"""The allocator's error, raised by hand in the middle of a step."""

from collections.abc import Callable
from typing import Any

import torch


def fail_once(model: Any, direction: str, passes: int) -> tuple[Callable[[], int], Callable[[], None]]:
    """Let the last layer's MLP run out of memory once, in the pass of that direction after so many others.

    Returns what tells how many passes are left, below 0 once it has struck, and what removes the trap.
    """
    left = passes

    def strike() -> None:
        nonlocal left
        left -= 1
        if left == -1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory (raised by the test)")

    def forward_hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if direction == "forward":
            strike()
        elif output.requires_grad:
            output.register_hook(lambda gradient: strike())

    hook = model.model.layers[-1].mlp.register_forward_hook(forward_hook)
    return lambda: left, hook.remove
