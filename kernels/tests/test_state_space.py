"""The recurrence of Mamba 2 over a forest is that of every row run alone: outputs, states and gradients together."""

from typing import Any

import pytest
import torch
from delta_rows import fork
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrence_rows import Leaves, check_recurrence, relative_error
from state_space_leaves import NAMES, leaves_of
from tree_shapes import SHAPES, chain, random_trie, subtree_end_of

from tree_kernels import TreeLayout, tree_state_space
from tree_kernels.tree_state_space.portable.chunked import chunked_state_space

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
IMPLEMENTATIONS = ("reference", "chunked")


def rows_alone(leaves: dict[str, torch.Tensor], paths: list[list[int]]) -> tuple[list[torch.Tensor], dict[int, Any]]:
    """Outputs of each path alone and the state after every token, token by token."""
    group = leaves["x"].shape[1] // leaves["b"].shape[1]
    outputs, states = [], {}
    for path in paths:
        state, row = leaves["state"], []
        for token in path:
            b, c = (leaves[name][token].repeat_interleave(group, dim=0) for name in "bc")
            state = state * leaves["g"][token].exp()[:, None, None]
            state = state + leaves["dt"][token][:, None, None] * b[:, :, None] * leaves["x"][token][:, None, :]
            row.append((state * c[:, :, None]).sum(1))
            states[token] = state
        outputs.append(torch.stack(row))
    return outputs, states


def check(
    parent: list[int],
    *,
    dtype: torch.dtype = torch.float64,
    impls: tuple[str, ...] = IMPLEMENTATIONS,
    states_at: tuple[int, ...] = (),
    **problem: Any,
) -> None:
    def recurrence(inputs: Leaves, layout: TreeLayout, impl: str) -> Any:
        options = {"initial_state": inputs["state"], "return_states_at": states_at or None}
        return tree_state_space(*(inputs[name] for name in NAMES[:5]), layout, impl=impl, **options)

    asked = {"impls": impls, "dtype": dtype, "tolerance": TOLERANCE[dtype], "states_at": states_at}
    check_recurrence(parent, leaves_of(len(parent), **problem), rows_alone, recurrence, **asked)


@pytest.mark.parametrize("size", [3, 70])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape: str, size: int) -> None:
    check(SHAPES[shape](size), states_at=(size - 1, 0, size // 2))


@pytest.mark.parametrize("prefix", [1, 2, 3, 63, 64, 65, 129])
def test_every_prefix_length(prefix: int) -> None:
    check(fork(prefix, [5, 1, 70]), dtype=torch.float32, impls=("chunked",), states_at=(prefix - 1,))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("decay", [(1e-3, 20.0), (20.0, 20.0)])
def test_every_decay(decay: tuple[float, float], dtype: torch.dtype) -> None:
    check(fork(70, [30, 66]), dtype=dtype, impls=("chunked",), decay=decay, states_at=(100,))


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (2, 6), (1, 4)])
def test_every_grouping_of_heads(heads: tuple[int, int]) -> None:
    check(SHAPES["random_trie"](40), groups=heads[0], heads=heads[1], state=5, head_size=3)


@settings(max_examples=20, deadline=None, database=None)
@given(size=st.integers(1, 30), seed=st.integers(0, 10**6), roots=st.integers(1, 3), tile_tokens=st.integers(1, 20))
def test_random_tries_in_tiles_of_any_size(size: int, seed: int, roots: int, tile_tokens: int) -> None:
    layout = TreeLayout.from_subtree_end(subtree_end_of(random_trie(size, seed, branching=0.4, roots=roots)))
    inputs = [leaf.requires_grad_() for leaf in leaves_of(size, seed=seed).values()]
    wanted = (size // 2, size - 1)
    results = []
    for impl in IMPLEMENTATIONS:
        if impl == "reference":
            out, states = tree_state_space(
                *inputs[:5], layout, initial_state=inputs[5], return_states_at=wanted, impl=impl
            )
        else:
            out, states = chunked_state_space(*inputs[:5], layout, inputs[5], wanted, tile_tokens=tile_tokens)
        assert states is not None
        results.append([out, states, *torch.autograd.grad(out.square().sum() + states.sum(), inputs)])
    for expected, actual in zip(*results, strict=True):
        assert relative_error(actual, expected) < 1e-10


def test_a_branch_changes_no_bit_of_its_siblings() -> None:
    parent = fork(70, [40, 30, 3])
    branch, others = slice(110, 140), [*range(70, 110), *range(140, 143)]
    layout = TreeLayout.from_subtree_end(subtree_end_of(parent))
    results = []
    for seed in (0, 1):
        leaves = leaves_of(len(parent))
        other = leaves_of(len(parent), seed=seed)
        for name in NAMES[:5]:
            leaves[name][branch] = other[name][branch]
        inputs = [leaves[name].float().requires_grad_() for name in NAMES[:5]]
        out, _ = tree_state_space(*inputs, layout)
        results.append([out[branch], *(t[others] for t in (out, *torch.autograd.grad(out.square().sum(), inputs)))])
    one, two = results
    assert not torch.equal(one[0], two[0])
    assert all(torch.equal(a, b) for a, b in zip(one[1:], two[1:], strict=True))


def test_no_tokens_is_no_output_with_a_graph() -> None:
    leaves = [leaf.requires_grad_() for leaf in leaves_of(0).values()]
    end = torch.zeros(0, dtype=torch.int32)
    out, states = tree_state_space(*leaves[:5], end, initial_state=leaves[5], return_states_at=())
    (gradient,) = torch.autograd.grad(out.sum(), leaves[5])
    assert states is not None and states.shape == (0, 4, 8, 6) and torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"b_NGK": torch.randn(4, 3, 8)}, "expected x"),
        ({"x_NHP": torch.randn(4, 3, 6), "g_NH": torch.zeros(4, 3), "dt_NH": torch.zeros(4, 3)}, "multiple of G"),
        ({"g_NH": torch.zeros(4, 3)}, r"g and dt \[N, H\]"),
        ({"layout": subtree_end_of(chain(5))}, "layout of 5 tokens"),
        ({"x_NHP": torch.randn(4, 4, 6).half()}, "one floating point dtype"),
        ({"initial_state": torch.zeros(4, 8, 5)}, r"initial_state \(4, 8, 6\)"),
        ({"return_states_at": (4,)}, r"tokens in \[0, 4\), received 4"),
        ({"impl": "flex"}, "expected one of"),
    ],
)
def test_misfits_are_named(changes: dict[str, Any], complaint: str) -> None:
    x, b, c, g, dt, _ = (leaf.float() for leaf in leaves_of(4).values())
    arguments = {"x_NHP": x, "b_NGK": b, "c_NGK": c, "g_NH": g, "dt_NH": dt, "layout": subtree_end_of(chain(4))}
    tree_state_space(**arguments)
    with pytest.raises(ValueError, match=complaint):
        tree_state_space(**(arguments | changes))
