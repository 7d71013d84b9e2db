"""Recurrences over a forest, held against every row run alone: outputs, states at tokens and gradients together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tree_shapes import fork, hang, layout_of, paths_of

from tree_kernels import TreeLayout, tree_gated_delta_rule, tree_state_space
from tree_kernels.tree_gated_delta_rule.portable.chunked import chunked_delta_rule
from tree_kernels.tree_state_space.portable.chunked import chunked_state_space

Leaves = dict[str, torch.Tensor]
RowsAlone = Callable[[Leaves, list[list[int]]], tuple[list[torch.Tensor], dict[int, torch.Tensor]]]
"""Outputs of each path, and the state after every token."""
SCALE = 0.4
SMALL_TILES = (
    ("chain", 1, torch.float32),
    ("comb", 40, torch.float16),
    ("random_trie", 40, torch.float32),
    ("forest", 40, torch.float16),
)
"""Shape, tokens and dtype of forests for tiles of 16 tokens."""


def delta_leaves(
    size: int,
    *,
    groups: int = 2,
    heads: int = 4,
    key_size: int = 8,
    value_size: int = 6,
    decay: tuple[float, float] = (0.001, 2.0),
    repeats_keys: bool = False,
    beta: float | None = None,
    seed: int = 0,
) -> Leaves:
    """float64 inputs of the gated delta rule; -g is drawn log-uniformly between the two decays, keys and queries have
    unit length. All keys are equal if they are to repeat, and all beta if one is given."""
    draw = torch.Generator().manual_seed(1000 * size + seed)
    normal = partial(torch.randn, dtype=torch.float64, generator=draw)
    uniform = partial(torch.rand, dtype=torch.float64, generator=draw)
    low, high = decay
    q, k = (torch.nn.functional.normalize(normal(size, groups, key_size), dim=-1) for _ in range(2))
    return {
        "q": q,
        "k": k[:1].expand_as(k).contiguous() if repeats_keys else k,
        "v": normal(size, heads, value_size),
        "g": -low * (high / low) ** uniform(size, heads),
        "beta": uniform(size, heads) if beta is None else torch.full((size, heads), beta, dtype=torch.float64),
        "initial_state": normal(heads, key_size, value_size),
    }


def state_space_leaves(size: int, **problem: Any) -> Leaves:
    """The same of Mamba 2's recurrence, whose keys and queries have a length of their own."""
    leaves = delta_leaves(size, **problem)
    c, b = (leaves[name] * leaves[name].shape[-1] ** 0.5 for name in "qk")
    rest = {"g": leaves["g"], "dt": leaves["beta"], "initial_state": leaves["initial_state"]}
    return {"x": leaves["v"], "b": b, "c": c, **rest}


Step = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Output and next state of one token, from the state before it and the token's inputs by name."""


def delta_step(state: torch.Tensor, *, q: Any, k: Any, v: Any, g: Any, beta: Any) -> tuple[torch.Tensor, torch.Tensor]:
    state = state * g.exp()[:, None, None]
    delta = beta[:, None] * (v - (state * k[:, :, None]).sum(1))
    state = state + k[:, :, None] * delta[:, None, :]
    return SCALE * (state * q[:, :, None]).sum(1), state


def state_space_step(
    state: torch.Tensor, *, x: Any, b: Any, c: Any, g: Any, dt: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    state = state * g.exp()[:, None, None] + dt[:, None, None] * b[:, :, None] * x[:, None, :]
    return (state * c[:, :, None]).sum(1), state


def step_by_step(
    step: Step, leaves: Leaves, paths: list[list[int]]
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """Every path alone; the state after a token is that of the last path through it."""
    *inputs, initial = leaves
    outputs, states = [], {}
    for path in paths:
        state, row = leaves[initial], []
        for token in path:
            of_token = {name: leaves[name][token] for name in inputs}
            given = {name: one.repeat_interleave(len(state) // len(one), dim=0) for name, one in of_token.items()}
            out, state = step(state, **given)
            row.append(out)
            states[token] = state
        outputs.append(torch.stack(row))
    return outputs, states


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """An operation with a state."""

    run: Callable[..., Any]
    """The operation; it takes the first five inputs, a layout, and options."""
    chunked: Callable[..., Any]
    """Its portable form in tiles of any size: of inputs, layout, initial state and tokens whose states are wanted."""
    leaves_of: Callable[..., Leaves]
    """Six inputs, the last of them the initial state."""
    rows_alone: RowsAlone
    narrow: str
    """Inputs in half precision; the others stay float32."""


DELTA_RULE = Recurrence(
    run=partial(tree_gated_delta_rule, scale=SCALE),
    chunked=lambda *inputs, **options: chunked_delta_rule(*inputs[:6], SCALE, *inputs[6:], **options),
    leaves_of=delta_leaves,
    rows_alone=partial(step_by_step, delta_step),
    narrow="qkv",
)
STATE_SPACE = Recurrence(
    run=tree_state_space,
    chunked=chunked_state_space,
    leaves_of=state_space_leaves,
    rows_alone=partial(step_by_step, state_space_step),
    narrow="xbc",
)
RECURRENCES = {"gated_delta_rule": DELTA_RULE, "state_space": STATE_SPACE}


def relative_error(actual: torch.Tensor, expected: torch.Tensor, smallest: float = 1e-3) -> float:
    assert actual.isfinite().all()
    return float((actual.double() - expected).detach().norm() / expected.detach().norm().clamp(min=smallest))


def check_against_rows(
    parent: list[int],
    leaves: Leaves,
    rows_alone: RowsAlone,
    recurrence: Callable[[Leaves, TreeLayout, str], tuple[torch.Tensor, torch.Tensor | None]],
    *,
    impls: Sequence[str],
    dtype: torch.dtype,
    tolerance: float,
    state_tolerance: float | None = None,
    states_at: Sequence[int] = (),
    unused: Sequence[str] = (),
) -> None:
    """Weigh every token of every row at random, and every state asked for; compare values and all gradients.

    Both sides start from float64 leaves as the dtype holds them. States that are copies have a tolerance of 0; `unused`
    names leaves that the recurrence does not get.
    """
    exact = {name: leaf.detach().to(dtype).double().requires_grad_() for name, leaf in leaves.items()}
    paths = paths_of(parent)
    rows, states = rows_alone(exact, paths)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(row.shape, dtype=torch.float64, generator=draw) for row in rows]
    kept = torch.stack([states[token] for token in states_at]) if states_at else torch.zeros(0)
    loss: Any = sum(((weight * row).sum() for weight, row in zip(weights, rows, strict=True)), kept.square().sum())
    wanted = torch.autograd.grad(loss, list(exact.values()), allow_unused=True, materialize_grads=True)
    for impl in impls:
        inputs = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in leaves.items()}
        out, got_states = recurrence(inputs, layout_of(parent), impl)
        assert out.dtype == dtype and (got_states is None) == (not states_at)
        loss = torch.zeros((), dtype=torch.float64)
        for path, weight, row in zip(paths, weights, rows, strict=True):
            assert relative_error(out[path], row) < tolerance
            loss = loss + (weight * out[path]).sum()
        if got_states is not None:
            assert relative_error(got_states, kept) <= (tolerance if state_tolerance is None else state_tolerance)
            loss = loss + got_states.double().square().sum()
        found = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True, materialize_grads=True)
        for name, actual, expected in zip(leaves, found, wanted, strict=True):
            assert actual.dtype == dtype
            assert name in unused or relative_error(actual, expected) < tolerance, (impl, name)


def outputs_and_gradients(run: Callable[..., Any], leaves: Leaves, layout: TreeLayout, **options: Any) -> Leaves:
    """What a recurrence gives from leaves on a device: output, states, and gradients of a loss that weighs all."""
    inputs = [leaf.detach().clone().requires_grad_() for leaf in leaves.values()]
    out, states = run(*inputs[:5], layout, initial_state=inputs[5], **options)
    # Weights that every dtype holds: none rounds the gradient of its outputs.
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().double().to(out.device)
    loss = (weight * out.double()).sum() + states.double().square().sum()
    return {"out": out, "states": states} | dict(zip(leaves, torch.autograd.grad(loss, inputs), strict=True))


def rounded_leaves(
    recurrence: Recurrence, size: int, dtype: torch.dtype, device: torch.device | str, **problem: Any
) -> tuple[Leaves, Leaves]:
    """Inputs as models have them in `dtype`, and the same numbers in float64."""
    leaves = {
        name: leaf.to(device, dtype if name in recurrence.narrow else torch.float32)
        for name, leaf in recurrence.leaves_of(size, **problem).items()
    }
    return leaves, {name: leaf.double() for name, leaf in leaves.items()}


def assert_siblings_keep_their_bits(
    run: Callable[..., torch.Tensor],
    given: Sequence[torch.Tensor],
    other: Sequence[torch.Tensor],
    branch: slice,
    others: Sequence[int],
) -> None:
    """Outputs and gradients at other tokens are the same for inputs that differ in one branch alone."""
    mixed = [
        torch.cat([one[: branch.start], two[branch], one[branch.stop :]]) for one, two in zip(given, other, strict=True)
    ]
    results, changed = [], []
    for leaves in (given, mixed):
        inputs = [one.detach().requires_grad_() for one in leaves]
        out = run(*inputs)
        gradients = torch.autograd.grad(out.float().square().sum(), inputs)
        results.append([t[others] for t in (out, *gradients)])
        changed.append(out[branch])
    assert not torch.equal(*changed)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def chains_from_one_tile() -> list[int]:
    """Parents of branches off both ends and the middle of the same tile, long enough to be chains of their own."""
    return hang(hang(fork(16, [18, 18]), 3, 17), 7, 17, 17)
