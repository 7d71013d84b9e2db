"""What does not fit is refused with what was expected and what was received."""

import importlib.util
from typing import Any

import pytest
import torch
from tree_shapes import chain, layout_of, subtree_end_of

from tree_kernels import UnsupportedImplementation, chosen_implementation, tree_attention, unavailable_reason

CPU = torch.device("cpu")


def call(**changes: Any) -> Any:
    usual = {"q_NHD": torch.randn(4, 4, 8), "k_NHD": torch.randn(4, 2, 8), "v_NHD": torch.randn(4, 2, 8)}
    return tree_attention(**{**usual, "layout": layout_of(chain(4)), **changes})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"q_NHD": torch.randn(4, 3, 8)}, "multiple of Hkv, received Hq=3, Hkv=2"),
        ({"q_NHD": torch.randn(1, 4, 4, 8)}, r"expected q \[N, Hq, D\]"),
        ({"v_NHD": torch.randn(4, 1, 8)}, r"k \[N, Hkv, D\] and v \[N, Hkv, E\]"),
        ({"q_NHD": torch.randn(5, 4, 8)}, "expected N tokens"),
        ({"q_NHD": torch.randn(4, 4, 8).double()}, "expected one dtype, received torch.float64, torch.float32"),
        ({"past_k": torch.randn(2, 2, 8)}, "past_k and past_v together"),
        ({"past_k": torch.randn(2, 2, 8), "past_v": torch.randn(3, 2, 8)}, "expected past_k and past_v"),
        ({"past_k": torch.randn(0, 2, 8), "past_v": torch.randn(0, 2, 4)}, "expected past_k and past_v"),
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
    k, past, end = torch.randn(4, 2, 8), torch.randn(3, 2, 8), subtree_end_of(chain(4))
    given = {"q_NHD": torch.randn(4, 4, 8), "k_NHD": k, "v_NHD": k, "past_k": past, "past_v": past}
    assert torch.equal(call(layout=layout_of(chain(4), 3), **given), call(layout=end, **given))


@pytest.mark.parametrize(("impl", "named"), [("flex", "FlexAttention"), ("fa4", "flash-attn-4")])
def test_what_needs_a_gpu_is_refused_on_a_cpu_not_replaced(impl: str, named: str) -> None:
    with pytest.raises(UnsupportedImplementation, match=f'impl="{impl}" cannot run here: {named} needs a CUDA device'):
        call(impl=impl)


def test_auto_says_what_it_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cuda = torch.device("cuda")
    for deterministic in (False, True):
        assert chosen(CPU, torch.float32, deterministic) == "sdpa"
        assert chosen(cuda, torch.float64, deterministic) == "sdpa"
        assert chosen(cuda, torch.bfloat16, deterministic) == "triton"
        assert chosen(cuda, torch.float32, deterministic) == "triton"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert chosen(cuda, torch.bfloat16, False) == "flex"
    assert chosen(cuda, torch.bfloat16, True) == "sdpa"


def test_auto_prefers_what_was_tuned_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((8, 0), "flex"), ((9, 0), "triton"), ((12, 0), "flex")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert chosen(torch.device("cuda"), torch.float32, False) == expected
        assert chosen(torch.device("cuda"), torch.float32, True) == "triton"


def chosen(device: torch.device, dtype: torch.dtype, deterministic: bool) -> str:
    return chosen_implementation(device=device, dtype=dtype, head_size=128, deterministic=deterministic)


@pytest.mark.parametrize(
    ("impl", "device", "dtype", "size", "interpret", "complaint"),
    [
        ("sdpa", "cpu", torch.float64, 64, "0", None),
        ("flex", "cuda", torch.float64, 64, "0", "float64"),
        ("triton", "cuda", torch.float64, 64, "0", "received torch.float64"),
        ("triton", "cuda", torch.bfloat16, 264, "0", "head size <= 256, received 264"),
        ("triton", "cpu", torch.float32, 64, "0", "need a CUDA device"),
        ("triton", "cpu", torch.bfloat16, 64, "1", "is wrong in bfloat16"),
        ("triton", "cuda", torch.bfloat16, 256, "0", None),
        ("triton", "cpu", torch.float16, 64, "1", None),
    ],
)
def test_an_implementation_says_why_it_cannot_run(
    impl: Any, device: str, dtype: Any, size: int, interpret: str, complaint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = unavailable_reason(impl, device=torch.device(device), dtype=dtype, head_size=size)
    assert reason is None if complaint is None else complaint in str(reason)


@pytest.mark.parametrize("impl", ["flex", "fa4"])
def test_what_is_not_deterministic_is_refused_by_name(impl: str) -> None:
    problem = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_size": 128}
    assert "deterministic=True" in str(unavailable_reason(impl, **problem, deterministic=True))
    with pytest.raises(UnsupportedImplementation):
        call(impl=impl, deterministic=True)
    assert isinstance(call(deterministic=True), torch.Tensor)


def test_autocast_lowers_the_dtype_as_torch_does() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call()
    assert out.dtype == torch.bfloat16
