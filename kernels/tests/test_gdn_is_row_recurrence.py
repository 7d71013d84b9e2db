"""The gated delta rule of a forest is that of every row run alone: outputs, states and gradients together."""

from typing import Any

import pytest
import torch
from delta_rows import NAMES, delta_leaves, fork, rows_delta_rule
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrence_rows import Leaves, check_recurrence, relative_error
from tree_shapes import SHAPES, random_trie, subtree_end_of

from tree_kernels import TreeLayout, tree_gated_delta_rule
from tree_kernels.tree_gated_delta_rule.portable.chunked import chunked_delta_rule

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
IMPLEMENTATIONS = ("reference", "chunked")
SCALE = 0.4


def check(
    parent: list[int],
    *,
    dtype: torch.dtype = torch.float64,
    impls: tuple[str, ...] = IMPLEMENTATIONS,
    states_at: tuple[int, ...] = (),
    has_initial_state: bool = True,
    **problem: Any,
) -> None:
    leaves = delta_leaves(len(parent), **problem)
    if not has_initial_state:
        leaves["initial_state"] = torch.zeros_like(leaves["initial_state"])

    def recurrence(inputs: Leaves, layout: TreeLayout, impl: str) -> Any:
        state = inputs["initial_state"] if has_initial_state else None
        options = {"initial_state": state, "return_states_at": states_at or None}
        return tree_gated_delta_rule(*(inputs[n] for n in NAMES[:5]), layout, scale=SCALE, impl=impl, **options)

    check_recurrence(
        parent,
        leaves,
        lambda exact, paths: rows_delta_rule(exact, paths, SCALE),
        recurrence,
        impls=impls,
        dtype=dtype,
        tolerance=TOLERANCE[dtype],
        states_at=states_at,
        unused=() if has_initial_state else ("initial_state",),
    )


@pytest.mark.parametrize(
    ("shape", "size"), [*((shape, 65) for shape in SHAPES), *(("forest", size) for size in (1, 3, 64, 129))]
)
def test_every_shape(shape: str, size: int) -> None:
    check(SHAPES[shape](size), states_at=(size - 1, 0, size // 2))


@pytest.mark.parametrize("prefix", [1, 2, 3, 63, 64, 65, 129])
def test_every_prefix_length(prefix: int) -> None:
    check(fork(prefix, [5, 1, 70]), dtype=torch.float32, impls=("chunked",), states_at=(prefix - 1,))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("decay", [(1e-3, 20.0), (20.0, 20.0), (1e-6, 1e-6)])
def test_every_decay(decay: tuple[float, float], dtype: torch.dtype) -> None:
    check(fork(70, [30, 66]), dtype=dtype, impls=("chunked",), decay=decay, states_at=(100,))


@pytest.mark.parametrize(("heads", "sizes"), [((1, 1), (4, 8)), ((2, 2), (16, 16)), ((2, 6), (8, 3)), ((1, 4), (4, 8))])
def test_every_grouping_and_size_of_heads(heads: tuple[int, int], sizes: tuple[int, int]) -> None:
    parent = SHAPES["random_trie"](40)
    check(parent, key_heads=heads[0], value_heads=heads[1], key_size=sizes[0], value_size=sizes[1])


def test_rows_of_one_token_without_a_common_root() -> None:
    check([-1, -1, -1, 2, -1], states_at=(3, 1), has_initial_state=False)


def test_rows_that_repeat_one_token_stay_exact() -> None:
    # Equal keys: the products of a tile are as far from orthogonal as they can be.
    parent = fork(80, [60, 20])
    layout = TreeLayout.from_subtree_end(subtree_end_of(parent))
    leaves = {name: leaf.detach() for name, leaf in delta_leaves(len(parent)).items()}
    leaves["k"] = leaves["k"][:1].expand_as(leaves["k"])
    leaves["g"], leaves["beta"] = torch.full_like(leaves["g"], -1e-3), torch.full_like(leaves["beta"], 0.7)
    exact = [leaves[name].float().double().requires_grad_() for name in NAMES[:5]]
    rounded = [leaf.detach().float().requires_grad_() for leaf in exact]
    results = []
    for inputs, impl in ((exact, "reference"), (rounded, "chunked")):
        out, _ = tree_gated_delta_rule(*inputs, layout, impl=impl)
        results.append([out, *torch.autograd.grad((out * leaves["v"]).sum(), inputs)])
    for actual, expected in zip(results[1], results[0], strict=True):
        assert relative_error(actual, expected) < TOLERANCE[torch.float32]


@settings(max_examples=30, deadline=None, database=None)
@given(
    size=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    branching=st.sampled_from([0.05, 0.3, 0.7]),
    roots=st.integers(1, 3),
    tile_tokens=st.integers(1, 50),
    states=st.data(),
)
def test_random_tries_in_tiles_of_any_size(
    size: int, seed: int, branching: float, roots: int, tile_tokens: int, states: st.DataObject
) -> None:
    layout = TreeLayout.from_subtree_end(subtree_end_of(random_trie(size, seed, branching=branching, roots=roots)))
    wanted = tuple(states.draw(st.lists(st.integers(0, size - 1), max_size=3, unique=True)))
    leaves = delta_leaves(size, seed=seed)
    inputs = [leaves[name] for name in NAMES]
    expected = tree_gated_delta_rule(
        *inputs[:5], layout, initial_state=inputs[5], scale=SCALE, return_states_at=wanted, impl="reference"
    )
    actual = chunked_delta_rule(*inputs[:5], layout, SCALE, inputs[5], wanted, tile_tokens=tile_tokens)
    weights = [torch.randn_like(t) for t in actual]
    gradients = []
    for result in (expected, actual):
        loss = sum((weight * t).sum() for weight, t in zip(weights, result, strict=True) if t is not None)
        gradients.append([*result, *torch.autograd.grad(loss, inputs)])
    for got, want in zip(gradients[1], gradients[0], strict=True):
        assert want is not None and got is not None
        assert got.shape == want.shape and relative_error(got, want) < 1e-10


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_branch_changes_no_bit_of_its_siblings(dtype: torch.dtype) -> None:
    parent = fork(70, [40, 30, 3])
    branch, others = slice(110, 140), [*range(70, 110), *range(140, 143)]
    layout = TreeLayout.from_subtree_end(subtree_end_of(parent))
    results, changed = [], []
    for seed in (0, 1):
        leaves = {name: leaf.detach().to(dtype) for name, leaf in delta_leaves(len(parent)).items()}
        other = delta_leaves(len(parent), seed=seed)
        for name in NAMES[:5]:
            leaves[name][branch] = other[name].detach()[branch].to(dtype)
        inputs = [leaves[name].requires_grad_() for name in NAMES[:5]]
        out, _ = tree_gated_delta_rule(*inputs, layout)
        gradients = torch.autograd.grad(out.square().sum(), inputs)
        results.append([t[others] for t in (out, *gradients)])
        changed.append(out[branch])
    assert not torch.equal(*changed)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_no_tokens_is_no_output_with_a_graph() -> None:
    leaves = delta_leaves(0)
    layout = TreeLayout.from_subtree_end(torch.zeros(0, dtype=torch.int32))
    for impl in IMPLEMENTATIONS:
        out, states = tree_gated_delta_rule(
            *(leaves[name] for name in NAMES[:5]),
            layout,
            initial_state=leaves["initial_state"],
            return_states_at=(),
            impl=impl,
        )
        assert out.shape == (0, 4, 6) and states is not None and states.shape == (0, 4, 8, 6)
        (gradient,) = torch.autograd.grad(out.sum(), leaves["initial_state"])
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_float16_inputs_keep_their_dtype_and_sum_in_float32() -> None:
    parent = fork(70, [30, 20])
    layout = TreeLayout.from_subtree_end(subtree_end_of(parent))
    rounded = [leaf.detach().half() for leaf in delta_leaves(len(parent)).values()]
    exact = [leaf.double() for leaf in rounded]
    out, states = tree_gated_delta_rule(*rounded[:5], layout, initial_state=rounded[5].float(), return_states_at=(99,))
    truth, true_states = tree_gated_delta_rule(
        *exact[:5], layout, initial_state=exact[5], return_states_at=(99,), impl="reference"
    )
    assert out.dtype == torch.float16 and states is not None and states.dtype == torch.float32
    assert true_states is not None and relative_error(states, true_states) < 2e-5
    assert relative_error(out, truth) < 1e-3
