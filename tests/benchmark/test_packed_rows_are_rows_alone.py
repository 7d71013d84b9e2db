"""The flat side of the benchmark is right: packed rows compute what every row computes alone."""

import pytest
import torch

from tree_kernels import UnsupportedImplementation, tree_attention
from tree_rl.benchmark.against_packed.packed_attention import PackedLayout, packed_attention
from tree_rl.benchmark.against_packed.random_model import build_model
from tree_rl.benchmark.against_packed.update import log_probs, packed_planner
from tree_rl.benchmark.batch import Batch, agent_batch
from tree_rl.cost.model_sizes import MODEL_SIZES
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.tree.packing import fill_bins

CPU = torch.device("cpu")


def small_batch(por: float = 0.5) -> Batch:
    return agent_batch(por=por, num_rows=6, row_tokens=50, num_groups=2, trained_share=0.4, vocab=512)


NAMES = ("tiny", "tiny-qwen3.5", "tiny-a3b", "tiny-v2-lite")


@pytest.mark.parametrize("name", NAMES)
def test_packed_log_probs_are_those_of_the_plain_model_on_rows_alone(name: str) -> None:
    batch = small_batch()
    model, plain = (build_model(MODEL_SIZES[name], device=CPU, dtype=torch.float32) for _ in range(2))
    plain.set_attn_implementation("eager")
    seen = []
    for forward in packed_planner(200, CPU)(batch):
        seen += forward.rows
        with torch.no_grad():
            got = log_probs(model, forward)
            alone = branch_log_probs(plain, [batch.rows[row].tolist() for row in forward.rows])
        wanted = forward.advantages() != 0
        torch.testing.assert_close(got[wanted], alone[wanted], rtol=0, atol=2e-5)
        assert not got[~wanted].any()
    assert sorted(seen) == list(range(12))


def test_an_implementation_that_cannot_run_says_why() -> None:
    q = torch.zeros(3, 2, 16)
    for impl in ("fa4", "cudnn", "flash", "flex"):
        with pytest.raises(UnsupportedImplementation, match="needs a CUDA device"):
            packed_attention(q, q, q, PackedLayout([3], CPU), impl=impl)


def test_trees_that_share_nothing_are_the_rows() -> None:
    layout = PackedLayout([3, 7, 1], CPU)
    q, k, v = torch.randn(3, 11, 2, 16, generator=torch.Generator().manual_seed(0))
    rows = packed_attention(q, k, v, layout, impl="sdpa")
    torch.testing.assert_close(tree_attention(q, k, v, layout.rows_apart, impl="reference"), rows)


@pytest.mark.parametrize("max_tokens", [1, 7, 30, 1000])
def test_every_row_is_packed_once_and_within_the_budget(max_tokens: int) -> None:
    lengths = [5, 30, 2, 9, 9, 1, 30, 17]
    bins = fill_bins(lengths, max_tokens)
    assert sorted(row for content in bins for row in content) == list(range(len(lengths)))
    assert all(len(content) == 1 or sum(lengths[row] for row in content) <= max_tokens for content in bins)
