"""Whatever the blocks of a launch, the kernels of the delta rule read and write inside their tensors only.

Triton's interpreter runs the source of the kernels: every address is checked. What a compiler makes of it is not.
"""

import os
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from recurrences import delta_leaves
from tree_shapes import fork, hang, layout_of

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from tree_kernels.tree_gated_delta_rule.triton_kernels import autograd, problem
from tree_kernels.tree_gated_delta_rule.triton_kernels.device_plan import DevicePlan, device_plan
from tree_kernels.tree_gated_delta_rule.triton_kernels.sizes import Launch, launches_for

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="checks what is interpreted")
SIZE, TILE = 32, 16


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every access of a launch is held against the tensors it was given; collects how many there were."""
    spans: list[tuple[int, int]] = []
    accesses: list[int] = []

    def check(addresses: np.ndarray, mask: np.ndarray | None, bytes_each: int) -> None:
        touched = addresses if mask is None else addresses[np.broadcast_to(mask, addresses.shape)]
        inside = np.zeros(touched.shape, bool)
        for first, stop in spans:
            inside |= (touched >= first) & (touched + bytes_each <= stop)
        assert inside.all(), f"{(~inside).sum()} of {inside.size} addresses outside of {len(spans)} tensors"
        accesses.append(inside.size)

    def tensors_of(self: Any, args: Any, kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        assert all(t.is_contiguous() for t in tensors)
        spans[:] = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]
        return to_host(self, args, kwargs)

    def load(pointers: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        check(pointers, mask, np.dtype(dtype).itemsize)
        return inner.load(pointers, mask, other, dtype)

    def store(pointers: np.ndarray, values: np.ndarray, mask: np.ndarray) -> None:
        check(pointers, mask, values.dtype.itemsize)
        return inner.store(pointers, values, mask)

    to_host, inner = interpreter.GridExecutor._init_args_hst, interpreter._interpreter
    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", tensors_of)
    monkeypatch.setattr(interpreter, "_interpreter", type("Guard", (), {"load": load, "store": store}))
    yield accesses


def run(monkeypatch: pytest.MonkeyPatch, keys: int, values: int, block_rows: int | None) -> None:
    """Forward and backward of a forest whose tiles several chains leave in several places, none of them full."""
    parent = hang(hang(fork(11, [12]), 3, 12), 7, 12)
    usual = launches_for(torch.float32, SIZE, SIZE)
    blocks = Launch(keys=keys, values=values, warps=4, stages=1)
    names = [field.name for field in fields(usual) if field.name != "inverse_block_rows"]
    launches = replace(usual, inverse_block_rows=block_rows, **dict.fromkeys(names, blocks))
    monkeypatch.setattr(problem, "launches_for", lambda *sizes: launches)
    leaves = delta_leaves(len(parent), groups=1, heads=1, key_size=SIZE, value_size=SIZE).values()
    inputs = [leaf.float().requires_grad_() for leaf in leaves]
    how = (layout_of(parent), 0.25, inputs[5], (7, 15))
    out, states = autograd.triton_delta_rule(*inputs[:5], *how, tile_tokens=TILE)
    gradients = torch.autograd.grad(out.sum() + states.sum(), inputs)
    assert all(t.isfinite().all() for t in (out, states, *gradients))


@pytest.mark.parametrize(
    ("keys", "values", "block_rows"),
    [(16, 16, 8), pytest.param(16, 32, None, marks=pytest.mark.slow), pytest.param(32, 16, 16, marks=pytest.mark.slow)],
)
def test_no_launch_leaves_its_tensors(
    keys: int, values: int, block_rows: int | None, guarded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, keys, values, block_rows)
    assert sum(guarded) > 10_000


def test_the_guard_sees_an_address_past_the_end(guarded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def short_of_a_tile(*wanted: Any) -> DevicePlan:
        plan = device_plan(*wanted)
        return replace(plan, main_row=plan.main_row[:-1])

    monkeypatch.setattr(autograd, "device_plan", short_of_a_tile)
    with pytest.raises(InterpreterError, match="1 of 1 addresses"):
        run(monkeypatch, 32, 32, None)
