"""The gated delta rule and Mamba 2's recurrence of a forest are those of every row run alone: outputs, states and
gradients together."""

from functools import partial
from inspect import signature
from typing import Any

import pytest
import recurrences
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrences import DELTA_RULE, RECURRENCES, Leaves, Recurrence, outputs_and_gradients, relative_error
from tree_shapes import SHAPES, chain, fork, layout_of, subtree_end_of, tries

from tree_kernels import TreeLayout

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
IMPLEMENTATIONS = ("reference", "chunked")


@pytest.fixture(params=RECURRENCES)
def recurrence(request: pytest.FixtureRequest) -> Recurrence:
    return RECURRENCES[request.param]


def check(
    recurrence: Recurrence,
    parent: list[int],
    *,
    dtype: torch.dtype = torch.float64,
    impls: tuple[str, ...] = IMPLEMENTATIONS,
    states_at: tuple[int, ...] = (),
    has_initial_state: bool = True,
    **problem: Any,
) -> None:
    leaves = recurrence.leaves_of(len(parent), **problem)
    if not has_initial_state:
        leaves["initial_state"] = torch.zeros_like(leaves["initial_state"])

    def run(inputs: Leaves, layout: TreeLayout, impl: str) -> Any:
        *five, state = inputs.values()
        options = {"initial_state": state if has_initial_state else None, "return_states_at": states_at or None}
        return recurrence.run(*five, layout, impl=impl, **options)

    how = {"impls": impls, "dtype": dtype, "tolerance": TOLERANCE[dtype], "states_at": states_at}
    unused = () if has_initial_state else ("initial_state",)
    recurrences.check_against_rows(parent, leaves, recurrence.rows_alone, run, **how, unused=unused)


@pytest.mark.parametrize(
    ("shape", "size"), [*((shape, 65) for shape in SHAPES), *(("forest", size) for size in (1, 3, 64, 129))]
)
def test_every_shape(recurrence: Recurrence, shape: str, size: int) -> None:
    check(recurrence, SHAPES[shape](size), states_at=(size - 1, 0, size // 2))


@pytest.mark.parametrize("prefix", [1, 2, 3, 63, 64, 65, 129])
def test_every_prefix_length(recurrence: Recurrence, prefix: int) -> None:
    check(recurrence, fork(prefix, [5, 1, 70]), dtype=torch.float32, impls=("chunked",), states_at=(prefix - 1,))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("decay", [(1e-3, 20.0), (20.0, 20.0), (1e-6, 1e-6)])
def test_every_decay(recurrence: Recurrence, decay: tuple[float, float], dtype: torch.dtype) -> None:
    check(recurrence, fork(70, [30, 66]), dtype=dtype, impls=("chunked",), decay=decay, states_at=(100,))


@pytest.mark.parametrize(("heads", "sizes"), [((1, 1), (4, 8)), ((2, 2), (16, 16)), ((2, 6), (8, 3)), ((1, 4), (4, 8))])
def test_every_grouping_and_size_of_heads(
    recurrence: Recurrence, heads: tuple[int, int], sizes: tuple[int, int]
) -> None:
    problem = {"groups": heads[0], "heads": heads[1], "key_size": sizes[0], "value_size": sizes[1]}
    check(recurrence, SHAPES["random_trie"](40), **problem)


def test_rows_of_one_token_without_a_common_root(recurrence: Recurrence) -> None:
    check(recurrence, [-1, -1, -1, 2, -1], states_at=(3, 1), has_initial_state=False)


def test_rows_that_repeat_one_token_stay_exact() -> None:
    # Equal keys: the products of a tile are as far from orthogonal as they can be.
    equal = {"repeats_keys": True, "decay": (1e-3, 1e-3), "beta": 0.7}
    check(DELTA_RULE, fork(80, [60, 20]), dtype=torch.float32, impls=("chunked",), has_initial_state=False, **equal)


@settings(max_examples=30, deadline=None, database=None)
@given(
    recurrence=st.sampled_from(list(RECURRENCES.values())),
    parent=tries(40),
    seed=st.integers(0, 10**6),
    tile_tokens=st.integers(1, 50),
    states=st.data(),
)
def test_random_tries_in_tiles_of_any_size(
    recurrence: Recurrence, parent: list[int], seed: int, tile_tokens: int, states: st.DataObject
) -> None:
    layout, size = layout_of(parent), len(parent)
    wanted = tuple(states.draw(st.lists(st.integers(0, size - 1), max_size=3, unique=True)))
    leaves = recurrence.leaves_of(size, seed=seed)
    expected = outputs_and_gradients(recurrence.run, leaves, layout, return_states_at=wanted, impl="reference")

    def in_tiles(*five: Any, initial_state: torch.Tensor) -> Any:
        return recurrence.chunked(*five, initial_state, wanted, tile_tokens=tile_tokens)

    for name, actual in outputs_and_gradients(in_tiles, leaves, layout).items():
        assert actual.shape == expected[name].shape and relative_error(actual, expected[name]) < 1e-10, name


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_branch_changes_no_bit_of_its_siblings(recurrence: Recurrence, dtype: torch.dtype) -> None:
    parent, branch = fork(70, [40, 30, 3]), slice(110, 140)
    both = (recurrence.leaves_of(len(parent), seed=seed).values() for seed in (0, 1))
    given, other = ([leaf.to(dtype) for leaf in leaves][:5] for leaves in both)
    others = [*range(70, 110), *range(140, 143)]
    run = partial(recurrence.run, layout=layout_of(parent))
    recurrences.assert_siblings_keep_their_bits(lambda *five: run(*five)[0], given, other, branch, others)


def test_no_tokens_is_no_output_with_a_graph(recurrence: Recurrence) -> None:
    *five, state = recurrence.leaves_of(0).values()
    state.requires_grad_()
    for impl in IMPLEMENTATIONS:
        out, states = recurrence.run(*five, layout_of([]), initial_state=state, return_states_at=(), impl=impl)
        assert out.shape == (0, 4, 6) and states is not None and states.shape == (0, 4, 8, 6)
        (gradient,) = torch.autograd.grad(out.sum(), state)
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_float16_inputs_keep_their_dtype_and_sum_in_float32() -> None:
    parent = fork(70, [30, 20])
    *five, state = (leaf.half() for leaf in DELTA_RULE.leaves_of(len(parent)).values())
    exact = [leaf.double() for leaf in (*five, state)]
    asked = {"return_states_at": (99,)}
    out, states = DELTA_RULE.run(*five, layout_of(parent), initial_state=state.float(), **asked)
    truth, true_states = DELTA_RULE.run(
        *exact[:5], layout_of(parent), initial_state=exact[5], impl="reference", **asked
    )
    assert out.dtype == torch.float16 and states.dtype == torch.float32
    assert relative_error(states, true_states) < 2e-5
    assert relative_error(out, truth) < 1e-3


MISFITS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "gated_delta_rule": [
        ({"q_NHK": torch.zeros(1, 4, 2, 8)}, r"expected q, k \[N, Hk, K\]"),
        ({"k_NHK": torch.zeros(4, 2, 7)}, r"expected q, k \[N, Hk, K\]"),
        ({"v_NHV": torch.zeros(4, 3, 6), "g_NH": torch.zeros(4, 3), "beta_NH": torch.zeros(4, 3)}, "multiple of Hk"),
        ({"g_NH": torch.zeros(4, 2)}, r"g and beta \(4, 4\), received g \(4, 2\)"),
        ({"v_NHV": torch.zeros(4, 4, 6).double()}, "one floating point dtype"),
        ({"initial_state": torch.zeros(2, 8, 6)}, r"initial_state \(4, 8, 6\) in torch.float32"),
        ({"initial_state": torch.zeros(4, 8, 6).double()}, "in torch.float64"),
    ],
    "state_space": [
        ({"b_NGK": torch.zeros(4, 3, 8)}, "expected x"),
        ({"x_NHP": torch.zeros(4, 3, 6), "g_NH": torch.zeros(4, 3), "dt_NH": torch.zeros(4, 3)}, "multiple of G"),
        ({"g_NH": torch.zeros(4, 3)}, r"g and dt \[N, H\]"),
        ({"x_NHP": torch.zeros(4, 4, 6).half()}, "one floating point dtype"),
        ({"initial_state": torch.zeros(4, 8, 5)}, r"initial_state \(4, 8, 6\)"),
    ],
}
BOTH: list[tuple[dict[str, Any], str]] = [
    ({"layout": subtree_end_of(chain(5))}, "layout of 5 tokens"),
    ({"return_states_at": (0, 4)}, r"tokens in \[0, 4\), received 4"),
    ({"impl": "flex"}, "expected one of"),
]


@pytest.mark.parametrize(
    ("operation", "changes", "complaint"),
    [(name, *case) for name, cases in MISFITS.items() for case in (*cases, *BOTH)],
)
def test_misfits_are_named(operation: str, changes: dict[str, Any], complaint: str) -> None:
    run = RECURRENCES[operation].run
    *five, state = (leaf.float() for leaf in RECURRENCES[operation].leaves_of(4).values())
    arguments = dict(zip(signature(run).parameters, five, strict=False))
    arguments |= {"layout": subtree_end_of(chain(4)), "initial_state": state, "return_states_at": (3,)}
    run(**arguments)
    with pytest.raises(ValueError, match=complaint):
        run(**(arguments | changes))
