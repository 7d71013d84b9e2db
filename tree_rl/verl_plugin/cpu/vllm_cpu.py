"""Lets verl write new weights into vLLM where vLLM runs on a CPU; without effect on any other device.

There vLLM packs the weight of every linear layer for oneDNN and drops the parameter, so that `load_weights`, which verl
calls after each step, finds nothing to write to. Layers keep their weight here and multiply with torch.
"""

from typing import Any

from torch.nn import functional
from vllm.model_executor.layers import utils as layers
from vllm.platforms import current_platform


def keep_linear_weights() -> None:
    """Replace vLLM's choice of a packed matrix product; it is looked up anew for every layer that is built."""
    dispatch_packed = layers.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = functional.linear
        else:  # convolutions and experts stay vLLM's affair
            dispatch_packed(layer, remove_weight)

    layers.dispatch_cpu_unquantized_gemm = dispatch


if current_platform.is_cpu():
    keep_linear_weights()
