"""The flat side of the benchmark is right: packed rows compute what every row computes alone."""

import numpy as np
import pytest
import torch

from tree_kernels import UnsupportedImplementation
from tree_rl.benchmark.against_packed.packed_attention import PackedLayout, packed_attention
from tree_rl.benchmark.against_packed.packed_rows import pack_rows
from tree_rl.benchmark.against_packed.random_model import build_model
from tree_rl.benchmark.against_packed.update import log_probs, packed_planner, tree_planner
from tree_rl.benchmark.batch import Batch, agent_batch
from tree_rl.cost.model_sizes import MODEL_SIZES
from tree_rl.training.rows_alone import branch_log_probs

CPU = torch.device("cpu")


def small_batch(por: float = 0.5) -> Batch:
    return agent_batch(por=por, num_rows=6, row_tokens=50, num_groups=2, trained_share=0.4, vocab=512)


@pytest.mark.parametrize("project_all", [False, True])
def test_packed_log_probs_are_those_of_rows_alone(project_all: bool) -> None:
    batch = small_batch()
    model = build_model(MODEL_SIZES["tiny"], device=CPU, dtype=torch.float32)
    seen = []
    for forward in packed_planner(200, CPU, project_all=project_all)(batch):
        seen += forward.rows
        rows = [batch.rows[row] for row in forward.rows]
        with torch.no_grad():
            got = log_probs(model, forward)
            alone = torch.cat(
                [log_probs(model, part) for row in rows for part in packed_planner(50, CPU, project_all=True)(one(row))]
            )
        wanted = torch.ones_like(got, dtype=torch.bool) if project_all else forward.advantages() != 0
        torch.testing.assert_close(got[wanted], alone[wanted], rtol=0, atol=2e-5)
        assert project_all or not got[~wanted].any()
    assert sorted(seen) == list(range(12))


def one(row: np.ndarray) -> Batch:
    trained = np.ones(len(row), dtype=bool)
    return Batch(name="one", rows=(row,), trained=(trained,), groups=("",), advantage_B=np.ones(1, dtype=np.float32))


def test_a_row_packed_alone_is_the_plain_model() -> None:
    row = small_batch().rows[0]
    model = build_model(MODEL_SIZES["tiny"], device=CPU, dtype=torch.float32)
    with torch.no_grad():
        (packed,) = (log_probs(model, part) for part in packed_planner(50, CPU, project_all=True)(one(row)))
        model.set_attn_implementation("eager")
        plain = branch_log_probs(model, [row.tolist()])
    torch.testing.assert_close(packed, plain, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ("tiny-qwen3.5", "tiny-a3b", "tiny-v2-lite"))
def test_packed_rows_of_hybrid_and_sparse_models_are_those_of_the_plain_model(name: str) -> None:
    batch = small_batch()
    model = build_model(MODEL_SIZES[name], device=CPU, dtype=torch.float32)
    (forward,) = packed_planner(1000, CPU, project_all=True)(batch)
    with torch.no_grad():
        packed = log_probs(model, forward)
        model.set_attn_implementation("eager")
        plain = branch_log_probs(model, [batch.rows[row].tolist() for row in forward.rows])
    torch.testing.assert_close(packed, plain, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ("tiny", "tiny-qwen3.5", "tiny-a3b", "tiny-v2-lite"))
def test_both_sides_ask_for_the_same_log_probs(name: str) -> None:
    batch = small_batch()
    model = build_model(MODEL_SIZES[name], device=CPU, dtype=torch.float32)
    sums = []
    for planner in (tree_planner(500, CPU), packed_planner(500, CPU)):
        with torch.no_grad():
            parts = [(log_probs(model, forward) * forward.advantages()).sum() for forward in planner(batch)]
        sums.append(float(sum(parts)))
    assert sums[0] == pytest.approx(sums[1], rel=1e-5) and sums[0] != 0


def test_an_implementation_that_cannot_run_says_why() -> None:
    q = torch.zeros(3, 2, 16)
    for impl in ("fa4", "cudnn", "flash", "flex"):
        with pytest.raises(UnsupportedImplementation, match="needs a CUDA device"):
            packed_attention(q, q, q, PackedLayout([3], CPU), impl=impl)


@pytest.mark.parametrize("max_tokens", [1, 7, 30, 1000])
def test_every_row_is_packed_once_and_within_the_budget(max_tokens: int) -> None:
    lengths = [5, 30, 2, 9, 9, 1, 30, 17]
    bins = pack_rows(lengths, max_tokens)
    assert sorted(row for content in bins for row in content) == list(range(len(lengths)))
    assert all(len(content) == 1 or sum(lengths[row] for row in content) <= max_tokens for content in bins)
