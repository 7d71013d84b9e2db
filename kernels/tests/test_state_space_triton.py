"""The compiled kernels of Mamba 2's recurrence at the sizes of models, against float64, and bitwise repeatable."""

from functools import partial
from typing import Any

import pytest
import torch
from recurrences import STATE_SPACE, fork, layout_of, outputs_and_gradients, relative_error, rounded_leaves
from tree_shapes import SHAPES

from tree_kernels.tree_state_space.api import PROVEN_SIZES, chosen_implementation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ERROR = {torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Relative errors in norm: operands rounded to 11 or 8 bits a few times on the way."""
NEMOTRON: dict[str, Any] = {"groups": 2, "heads": 32, "key_size": 128, "value_size": 64}
ZAMBA: dict[str, Any] = {"groups": 1, "heads": 32, "key_size": 64, "value_size": 64}
FORESTS = {
    "forest": SHAPES["forest"](900),
    "comb": SHAPES["comb"](600),
    "star": fork(30, [20] * 30),
    "prefix_65": fork(65, [129, 64, 1, 200]),
}


def test_auto_takes_triton_at_proven_sizes_on_a_gpu_only() -> None:
    sizes = {"dtype": torch.bfloat16, "state_size": 128, "head_size": 64}
    assert chosen_implementation(device=torch.device("cpu"), **sizes) == "chunked"
    on_gpu = "triton" if DEVICE.type == "cuda" and (128, 64) in PROVEN_SIZES else "chunked"
    assert chosen_implementation(device=DEVICE, **sizes) == on_gpu
    assert chosen_implementation(device=DEVICE, **sizes | {"dtype": torch.float32}) == "chunked"


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("heads", (NEMOTRON, ZAMBA, NEMOTRON | {"value_size": 128}), ids=("nemotron", "zamba", "wide"))
@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("forest", FORESTS)
def test_compiled_kernels_equal_float64_and_repeat_bitwise(forest: str, dtype: torch.dtype, heads: Any) -> None:
    parent = FORESTS[forest]
    rounded, exact = rounded_leaves(STATE_SPACE, len(parent), dtype, DEVICE, **heads)
    layout, states_at = layout_of(parent).to(DEVICE), (len(parent) - 1, 5)
    run = partial(outputs_and_gradients, STATE_SPACE.run, layout=layout, return_states_at=states_at)
    truth = run(leaves=exact, impl="chunked")
    first, second = (run(leaves=rounded, impl="triton") for _ in range(2))
    for name, true in truth.items():
        assert relative_error(first[name], true, smallest=1e-2) < ERROR[dtype], name
        assert torch.equal(first[name], second[name])
