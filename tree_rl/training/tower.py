"""The images of one forest: the tower runs once, forward before the forest and backward after it.

The forest, or each of its partitions, reads detached features, whose gradients add up in at least float32.
"""

import torch

from tree_kernels.accumulation import accumulation_dtype
from tree_rl.models.images import PATCHES, TokensWithImages, empty_image
from tree_rl.training.context import StepContext
from tree_rl.training.row_images import ForestImages


class Tower:
    """Features of a forest's images, with the tower's graph."""

    def __init__(self, context: StepContext, images: ForestImages) -> None:
        self._context, self._images = context, images
        self._output: torch.Tensor | None = None
        self._features = torch.empty(0)

    def forward(self) -> None:
        """Run the tower on every image."""
        self._output = _features(self._context, self._images.patches(self._context.device))
        self._features = self._output.detach().to(accumulation_dtype(self._output.dtype))
        self._features.requires_grad_(self._output.requires_grad)

    def tokens(self) -> TokensWithImages:
        """The forest's tokens, for `TreeInputs`."""
        return self._images.tokens(self._features)

    def backward(self) -> None:
        """Backpropagate the gradients that all forwards left at the features."""
        assert self._output is not None
        output, gradient, self._output = self._output, self._features.grad, None
        if output.requires_grad:
            gradient = torch.zeros_like(output) if gradient is None else gradient.to(output.dtype)
            torch.autograd.backward(output, gradient)


def idle_tower(context: StepContext) -> torch.Tensor:
    """The tower on the smallest image, on a rank without one; returns a scalar 0, with graph if the tower trains."""
    return (_features(context, empty_image(context.module.config, context.device)) * 0).sum().float()


def _features(context: StepContext, patches: object) -> torch.Tensor:
    (features_SMC,) = context.forward(**{PATCHES: patches}).hidden_states
    return features_SMC
