"""Liger's fused RMSNorm, rotary embedding and SwiGLU for transformers models, as verl's `model.use_liger` puts them.

They act on each token alone, so a tree runs them as rows do.
"""

from importlib.util import find_spec

from transformers import PreTrainedModel

from tree_rl.models.support import UnsupportedModelError

PACKAGE = "liger_kernel"
KEY = "model.use_liger"


def has_liger() -> bool:
    """Whether liger-kernel is installed."""
    return find_spec(PACKAGE) is not None


def use_liger_layers(model: PreTrainedModel) -> None:
    """Exchange the layers of a built model. The rotary embedding changes for every model of this type in the process.

    Raises:
        ImportError: liger-kernel is not installed.
        UnsupportedModelError: liger-kernel knows no layers for this model, and would leave it as it is.
    """
    try:
        from liger_kernel.transformers.monkey_patch import (
            MODEL_TYPE_TO_APPLY_LIGER_FN,
            _apply_liger_kernel_to_instance,
        )
    except ImportError as error:
        raise ImportError(f"{KEY}=true needs liger-kernel: pip install 'liger-kernel>=0.8,<0.9'") from error
    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UnsupportedModelError(
            f"{KEY}=true: liger-kernel has no layers for model_type={model.config.model_type}; set {KEY}=false"
        )
    # The arguments of verl's engine. Liger's fused head would take the place of ours.
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, swiglu=True)
