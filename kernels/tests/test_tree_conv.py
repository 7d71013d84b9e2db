"""The short convolution of a forest is that of every row run alone: outputs, contexts and gradients together."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrences import Leaves, assert_siblings_keep_their_bits, check_against_rows
from tree_shapes import SHAPES, chain, fork, layout_of, subtree_end_of, tries

from tree_kernels import TreeLayout, UnsupportedImplementation, tree_causal_conv1d
from tree_kernels.tree_causal_conv1d.api import chosen_implementation
from tree_kernels.tree_causal_conv1d.windows import host_windows_of, jumps_of, readers

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
IMPLEMENTATIONS = ("reference", "shifted")
CHANNELS = 5


def check(
    parent: list[int],
    *,
    taps: int = 4,
    dtype: torch.dtype = torch.float64,
    activation: str | None = "silu",
    has_bias: bool = True,
    has_context: bool = True,
    contexts_at: tuple[int, ...] = (),
    impls: tuple[str, ...] = IMPLEMENTATIONS,
) -> None:
    draw = torch.Generator().manual_seed(len(parent))
    shapes = {"x": (len(parent), CHANNELS), "weight": (CHANNELS, taps), "bias": (CHANNELS,)}
    shapes["context"] = (taps - 1, CHANNELS)
    leaves = {name: torch.randn(shape, dtype=torch.float64, generator=draw) for name, shape in shapes.items()}
    if not has_context:
        leaves["context"].zero_()

    def rows_alone(exact: Leaves, paths: list[list[int]]) -> tuple[list[torch.Tensor], Leaves]:
        rows, last_inputs = [], {}
        for path in paths:
            inputs = torch.cat([exact["context"], exact["x"][path]])
            row = torch.nn.functional.conv1d(inputs.T[None], exact["weight"][:, None], groups=CHANNELS)[0].T
            row = row + exact["bias"] if has_bias else row
            rows.append(torch.nn.functional.silu(row) if activation else row)
            for depth, token in enumerate(path):
                last_inputs[token] = inputs[depth + 1 : depth + taps]
        return rows, last_inputs

    def convolution(inputs: Leaves, layout: TreeLayout, impl: str) -> Any:
        bias, context = inputs["bias"] if has_bias else None, inputs["context"] if has_context else None
        options = {"activation": activation, "return_contexts_at": contexts_at or None, "impl": impl}
        return tree_causal_conv1d(inputs["x"], inputs["weight"], bias, layout, initial_context=context, **options)

    how = {"impls": impls, "dtype": dtype, "tolerance": TOLERANCE[dtype], "state_tolerance": 0.0}
    unused = () if has_context else ("context",)
    check_against_rows(parent, leaves, rows_alone, convolution, **how, states_at=contexts_at, unused=unused)


@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape: str, size: int) -> None:
    check(SHAPES[shape](size), contexts_at=(size - 1, 0, size // 2))


@pytest.mark.parametrize("prefix", [1, 2, 3, 4, 63])
def test_a_prefix_shorter_than_the_window_reaches_to_what_is_before_it(prefix: int) -> None:
    for has_context, dtype in zip((True, False), TOLERANCE, strict=True):
        check(fork(prefix, [1, 2, 9]), dtype=dtype, has_context=has_context, contexts_at=(0, prefix, prefix + 1))


@pytest.mark.parametrize(("taps", "activation"), [(1, "silu"), (2, None), (3, "swish"), (6, "silu")])
def test_every_number_of_taps(taps: int, activation: str | None) -> None:
    check(SHAPES["bushy_trie"](40), taps=taps, activation=activation, has_bias=taps != 2, contexts_at=(7,))


def test_triton_kernels_interpreted_or_compiled() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    for parent, has_bias in ((SHAPES["bushy_trie"](70), True), (fork(2, [1, 40, 3]), False)):
        check(parent, dtype=torch.float32, has_bias=has_bias, contexts_at=(1, 4), impls=("triton",))
    check(SHAPES["comb"](20), dtype=torch.float32, activation=None, taps=3, has_context=False, impls=("triton",))


def test_auto_is_triton_on_cuda_at_the_taps_that_were_proven() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    cuda = torch.device("cuda")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert chosen_implementation(device=cuda, dtype=dtype, taps=4) == "triton"
    assert chosen_implementation(device=cuda, dtype=torch.float32, taps=3) == "shifted"
    assert chosen_implementation(device=cuda, dtype=torch.float64, taps=4) == "shifted"
    # Not even where the interpreter could.
    assert chosen_implementation(device=torch.device("cpu"), dtype=torch.float32, taps=4) == "shifted"


def test_triton_refuses_float64_by_name() -> None:
    with pytest.raises(UnsupportedImplementation, match="float64"):
        tree_causal_conv1d(
            torch.zeros(2, 3).double(), torch.zeros(3, 4).double(), None, subtree_end_of(chain(2)), impl="triton"
        )


@settings(max_examples=30, deadline=None, database=None)
@given(parent=tries(30), taps=st.integers(1, 5))
def test_random_tries(parent: list[int], taps: int) -> None:
    check(parent, taps=taps, contexts_at=(len(parent) // 2,))


@settings(max_examples=40, deadline=None, database=None)
@given(parent=tries(60), taps=st.integers(1, 6))
def test_windows_and_their_readers(parent: list[int], taps: int) -> None:
    size = len(parent)
    windows = host_windows_of(layout_of(parent), taps)
    for token, inputs in enumerate(windows.input_NK.tolist()):
        path = [*range(taps - 1)]
        ancestors = []
        while token >= 0:
            ancestors.append(taps - 1 + token)
            token = parent[token]
        assert inputs == (path + ancestors[::-1])[-taps:]
    is_run = windows.input_NK[:, 0] == np.arange(size)
    assert windows.jumping_R.tolist() == np.flatnonzero(~is_run).tolist()
    reader_start, reader = readers(windows)
    flat = windows.input_NK.ravel()
    assert reader.tolist() == np.argsort(flat, kind="stable").tolist()
    assert np.diff(reader_start).tolist() == np.bincount(flat, minlength=taps - 1 + size).tolist()


def test_only_tokens_near_a_jump_are_gathered() -> None:
    layout = layout_of(fork(50, [30, 2, 10]))
    assert jumps_of(layout, 4)[0].tolist() == [80, 81, 82, 83, 84]


@pytest.mark.parametrize("impl", ("shifted", "triton"))
def test_a_branch_changes_no_bit_of_its_siblings(impl: str) -> None:
    parent = fork(9, [7, 6, 2])
    layout = layout_of(parent)
    draw = torch.Generator().manual_seed(0)
    x, other, weight = (torch.randn(shape, CHANNELS, generator=draw) for shape in (len(parent), len(parent), 4))

    def run(given: torch.Tensor) -> torch.Tensor:
        return tree_causal_conv1d(given, weight.T, None, layout, activation="silu", impl=impl)[0]

    assert_siblings_keep_their_bits(run, (x,), (other,), slice(16, 22), [*range(9, 16), *range(22, 24)])


def test_no_tokens_is_no_output_with_a_graph() -> None:
    context = torch.randn(3, CHANNELS, requires_grad=True)
    end = torch.zeros(0, dtype=torch.int32)
    for impl in IMPLEMENTATIONS:
        out, _ = tree_causal_conv1d(
            torch.zeros(0, CHANNELS), torch.ones(CHANNELS, 4), None, end, initial_context=context, impl=impl
        )
        (gradient,) = torch.autograd.grad(out.sum(), context)
        assert out.shape == (0, CHANNELS) and torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"x_NC": torch.randn(1, 4, 5)}, r"expected x \[N, C\]"),
        ({"weight_CK": torch.randn(4, 4)}, r"weight \[C, K\]"),
        ({"bias_C": torch.randn(4)}, r"bias \[C\] = \[5\]"),
        ({"layout": subtree_end_of(chain(5))}, "layout of 5"),
        ({"initial_context": torch.randn(4, 5)}, r"initial_context \(3, 5\)"),
        ({"initial_context": torch.randn(3, 5).double()}, "in torch.float32, received"),
        ({"activation": "gelu"}, "activation in"),
        ({"return_contexts_at": (4,)}, r"tokens in \[0, 4\), received 4"),
        ({"impl": "fast"}, "expected one of"),
    ],
)
def test_misfits_are_named(changes: dict[str, Any], complaint: str) -> None:
    arguments = {"x_NC": torch.randn(4, 5), "weight_CK": torch.randn(5, 4), "bias_C": None}
    arguments |= {"layout": subtree_end_of(chain(4))}
    tree_causal_conv1d(**arguments)
    with pytest.raises(ValueError, match=complaint):
        tree_causal_conv1d(**(arguments | changes))
