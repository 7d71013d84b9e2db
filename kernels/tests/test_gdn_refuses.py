"""What does not fit the recurrence is refused with what was expected and received; "auto" is what is proven."""

from typing import Any

import pytest
import torch
from tree_shapes import chain, subtree_end_of

from tree_kernels import TreeLayout, tree_gated_delta_rule
from tree_kernels.tree_gated_delta_rule import api
from tree_kernels.tree_gated_delta_rule.triton_kernels import sizes


def call(**changes: Any) -> None:
    arguments: dict[str, Any] = {
        "q_NHK": torch.randn(4, 2, 8),
        "k_NHK": torch.randn(4, 2, 8),
        "v_NHV": torch.randn(4, 4, 6),
        "g_NH": torch.zeros(4, 4),
        "beta_NH": torch.zeros(4, 4),
        "layout": TreeLayout.from_subtree_end(subtree_end_of(chain(4))),
    }
    tree_gated_delta_rule(**(arguments | changes))


def test_what_fits_runs() -> None:
    call()
    call(layout=subtree_end_of(chain(4)), initial_state=torch.zeros(4, 8, 6), return_states_at=(3,))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"q_NHK": torch.randn(1, 4, 2, 8)}, r"expected q, k \[N, Hk, K\]"),
        ({"k_NHK": torch.randn(4, 2, 7)}, r"expected q, k \[N, Hk, K\]"),
        ({"v_NHV": torch.randn(4, 3, 6), "g_NH": torch.zeros(4, 3), "beta_NH": torch.zeros(4, 3)}, "multiple of Hk"),
        ({"g_NH": torch.zeros(4, 2)}, r"g and beta \(4, 4\), received g \(4, 2\)"),
        ({"layout": subtree_end_of(chain(5))}, "layout of 5 tokens"),
        ({"v_NHV": torch.randn(4, 4, 6).double()}, "one floating point dtype"),
        ({"initial_state": torch.zeros(2, 8, 6)}, r"initial_state \(4, 8, 6\) in torch.float32"),
        ({"initial_state": torch.zeros(4, 8, 6).double()}, "in torch.float64"),
        ({"return_states_at": (0, 4)}, r"tokens in \[0, 4\), received 4"),
        ({"impl": "fast"}, "expected one of"),
    ],
)
def test_misfits_are_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        call(**changes)


@pytest.mark.parametrize(
    ("device", "dtype", "size", "chosen"),
    [
        ("cuda", torch.bfloat16, 128, "triton"),
        ("cuda", torch.float16, 64, "triton"),
        ("cuda", torch.float32, 128, "chunked"),
        ("cuda", torch.bfloat16, 32, "chunked"),
        ("cpu", torch.bfloat16, 128, "chunked"),
    ],
)
def test_auto_takes_triton_where_it_is_proven_and_compiles_soon(
    device: str, dtype: torch.dtype, size: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "triton_unavailable_reason", lambda *_: None)
    arguments = {"device": torch.device(device), "dtype": dtype, "key_size": size, "value_size": size}
    assert api.chosen_implementation(**arguments) == chosen
