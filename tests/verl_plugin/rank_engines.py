"""Several ranks of tree engines in processes of their own, and one rank of stock verl that they are held against."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import ALONE, build_engine, ppo_batch
from equivalence import LOSS, run
from hostile_rows import SHAPES, row, tokens
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

COMB, BRANCHES = SHAPES["comb"], SHAPES["branches"]
DEALS: dict[str, list[list[Any]]] = {
    "unequal_trees": [[*COMB, *BRANCHES], [row(tokens(90, 7))]],
    "one_rank_untrained": [BRANCHES, [row(tokens(91, 5), mask=[0, 0, 0])]],
    "one_rank_empty": [BRANCHES, []],
    "both_work": [COMB, BRANCHES],
}
KEPT = {"reshard_after_forward": False, "use_no_sync_for_gradient_accumulation": False}
"""Options of verl by which weights and gradients stay whole during a step."""
SP = "ulysses_sequence_parallel_size"
LAYOUTS: dict[str, dict[str, Any]] = {"sp 2 x dp 2": {SP: 2}, "sp 4": {SP: 4}, "replicas 2": {"fsdp_size": 2}}
LAYOUTS["sp 2 x dp 2, replicas 2"] = {SP: 2, "fsdp_size": 2}
"""Of four ranks."""


def empty_batch() -> TensorDict:
    data = ppo_batch([row(tokens(1, 4))])
    none = torch.nested.nested_tensor_from_jagged(torch.zeros(0, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    flags = {key: data[key] for key in ("use_remove_padding", "use_dynamic_bsz", "max_token_len_per_gpu")}
    empty = TensorDict({"input_ids": none, "loss_mask": none, "position_ids": none}, batch_size=[0])
    tu.assign_non_tensor(empty, **flags, temperature=1.0, global_batch_size=1)
    return empty


def share_of(deal: str, rank: int, **flags: Any) -> TensorDict:
    share = DEALS[deal][rank]
    total = sum(map(len, DEALS[deal]))
    settings = {"calculate_entropy": True, "global_batch_size": total, **flags}
    return ppo_batch(share, seed=rank, **settings) if share else empty_batch()


def as_one_rank(model: Path, parts: list[TensorDict]) -> tuple[float, dict[str, torch.Tensor]]:
    """Stock verl's loss and gradients of all ranks' rows."""
    found = run(build_engine(model, tree=None), tu.concat_tensordict(parts), LOSS)
    return sum(found["loss"]), found["gradients"]


def assert_gradients_of_ranks(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    """Up to the rounding of sums over ranks, which the largest gradient decides."""
    assert got.keys() == expected.keys()
    largest = max(gradient.norm() for gradient in expected.values())
    for parameter, reference in expected.items():
        error = (got[parameter] - reference).norm()
        assert error <= 4e-5 * max(reference.norm(), 1e-3 * largest), parameter


def assert_trains_as_one(model: Path, of_ranks: list[dict[str, dict[str, Any]]], deal: str, name: str) -> None:
    """What the ranks found under a name is what one rank finds for the deal."""
    parts = [share_of(deal, rank, **ALONE) for rank in range(len(of_ranks)) if DEALS[deal][rank]]
    loss, expected = as_one_rank(model, parts)
    got = [found[name] for found in of_ranks]
    # verl averages the losses of ranks, each multiplied by dp_size.
    assert sum(g["loss"] for g in got) / len(got) == pytest.approx(loss, rel=1e-4)
    assert_gradients_of_ranks(expected, got[0]["gradients"])
    assert all(one["metrics"] == got[0]["metrics"] for one in got), "ranks must report metrics that verl can join"
