"""What does not fit is refused with what was expected and what was received."""

from typing import Any

import pytest
import torch
from tree_shapes import chain, subtree_end_of

from tree_kernels import (
    TreeLayout,
    UnsupportedImplementation,
    chosen_implementation,
    tree_attention,
    unavailable_reason,
)

CPU = torch.device("cpu")


def call(**changes: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    arguments: dict[str, Any] = {
        "q_NHD": torch.randn(4, 4, 8),
        "k_NHD": torch.randn(4, 2, 8),
        "v_NHD": torch.randn(4, 2, 8),
        "layout": TreeLayout.from_subtree_end(subtree_end_of(chain(4))),
    }
    arguments |= changes
    return tree_attention(**arguments)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"q_NHD": torch.randn(4, 3, 8)}, "multiple of Hkv, received Hq=3, Hkv=2"),
        ({"q_NHD": torch.randn(1, 4, 4, 8)}, r"expected q \[N, Hq, D\]"),
        ({"v_NHD": torch.randn(4, 2, 4)}, r"k, v \[N, Hkv, D\]"),
        ({"q_NHD": torch.randn(5, 4, 8)}, "expected N tokens"),
        ({"q_NHD": torch.randn(4, 4, 8).double()}, "one dtype and one device"),
        ({"past_k": torch.randn(2, 2, 8)}, "past_k and past_v together"),
        ({"past_k": torch.randn(2, 2, 8), "past_v": torch.randn(3, 2, 8)}, "expected past_k and past_v"),
        ({"past_k": torch.randn(2, 2, 8), "past_v": torch.randn(2, 2, 8)}, "expected a past of 0 tokens"),
        ({"window": 0}, "window >= 1, received 0"),
        ({"softcap": 0.0}, "softcap > 0"),
        ({"sinks": torch.zeros(2)}, r"expected sinks \[4\], received \(2,\)"),
        ({"impl": "eager"}, "received 'eager'"),
        ({"layout": torch.tensor([4, 4, 4, 9], dtype=torch.int32)}, r"subtree_end\[3\]"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        call(**changes)


def test_a_vector_of_ends_serves_as_layout() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(4, 4, 8), torch.randn(4, 2, 8)
    end = subtree_end_of(chain(4))
    past = torch.randn(3, 2, 8)
    layout = TreeLayout.from_subtree_end(end, past_length=3)
    by_layout = call(q_NHD=q, k_NHD=k, v_NHD=k, layout=layout, past_k=past, past_v=past)
    by_vector = call(q_NHD=q, k_NHD=k, v_NHD=k, layout=end, past_k=past, past_v=past)
    assert isinstance(by_layout, torch.Tensor) and isinstance(by_vector, torch.Tensor)
    assert torch.equal(by_layout, by_vector)


def test_flex_on_a_cpu_is_refused_not_replaced() -> None:
    with pytest.raises(UnsupportedImplementation, match='impl="flex" cannot run here: FlexAttention needs a CUDA'):
        call(impl="flex")


def test_auto_says_what_it_picks() -> None:
    assert chosen_implementation(device=CPU, dtype=torch.float32, head_size=64) == "sdpa"
    cuda = torch.device("cuda")
    assert chosen_implementation(device=cuda, dtype=torch.bfloat16, head_size=128) == "flex"
    assert chosen_implementation(device=cuda, dtype=torch.float64, head_size=128) == "sdpa"
    assert unavailable_reason("sdpa", device=CPU, dtype=torch.float64, head_size=64) is None
    assert "float64" in str(unavailable_reason("flex", device=cuda, dtype=torch.float64, head_size=64))


def test_autocast_lowers_the_dtype_as_torch_does() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call()
    assert isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16
