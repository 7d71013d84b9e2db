"""What moves pages between a GPU's cache and the host's: names that SGLang 0.5.12 imports and never calls on a CPU."""

from collections.abc import Callable
from typing import Any, NoReturn


def _absent(name: str) -> Callable[..., NoReturn]:
    def called(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.kvcacheio.{name} is a stand-in without a kernel: install sglang-kernel")

    return called


NAMES = (
    "transfer_kv_all_layer",
    "transfer_kv_all_layer_direct_lf_pf",
    "transfer_kv_all_layer_lf_pf",
    "transfer_kv_all_layer_lf_ph",
    "transfer_kv_all_layer_mla",
    "transfer_kv_all_layer_mla_lf_pf",
    "transfer_kv_direct",
    "transfer_kv_per_layer",
    "transfer_kv_per_layer_direct_pf_lf",
    "transfer_kv_per_layer_mla",
    "transfer_kv_per_layer_mla_pf_lf",
    "transfer_kv_per_layer_pf_lf",
    "transfer_kv_per_layer_ph_lf",
)
globals().update({name: _absent(name) for name in NAMES})
