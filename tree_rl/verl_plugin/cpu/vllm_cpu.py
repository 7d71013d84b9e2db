"""Lets verl write new weights into vLLM on a CPU; does nothing on other devices.

On a CPU vLLM packs every linear weight for oneDNN and drops the parameter, so `load_weights`, which verl calls after
each step, would find no parameter. Here layers keep their weight and use torch's matrix product.
"""

from typing import Any

from torch.nn import functional
from vllm.model_executor.layers import utils as layers
from vllm.platforms import current_platform


def keep_linear_weights() -> None:
    """Replace the function by which vLLM chooses each layer's matrix product."""
    dispatch_packed = layers.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = functional.linear
        else:  # convolutions and experts
            dispatch_packed(layer, remove_weight)

    layers.dispatch_cpu_unquantized_gemm = dispatch


if current_platform.is_cpu():
    keep_linear_weights()
