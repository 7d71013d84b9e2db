"""Several ranks of tree engines in processes of their own, and one rank of stock verl that they are held against."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from engine_harness import build_engine, gradients, ppo_batch
from equivalence import actor_loss, run
from hostile_rows import SHAPES, row, tokens
from rank_processes import free_port, start_ranks
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

COMB, BRANCHES, DEEP = SHAPES["comb"], SHAPES["branches"], SHAPES["branch_at_63_64_65"]
DEALS: dict[str, list[list[Any]]] = {
    "unequal_trees": [[*COMB, *BRANCHES], [row(tokens(90, 7))]],
    "one_rank_untrained": [BRANCHES, [row(tokens(91, 5), mask=[0, 0, 0])]],
    "one_rank_empty": [BRANCHES, []],
    "four_unequal": [DEEP, [row(tokens(92, 5))], [*COMB, *BRANCHES], BRANCHES],
    "four_two_empty": [[], DEEP, [], COMB],
}


def empty_batch() -> TensorDict:
    """A rank's share with no rows."""
    data = ppo_batch([row(tokens(1, 4))])
    none = torch.nested.nested_tensor_from_jagged(torch.zeros(0, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    flags = {key: data[key] for key in ("use_remove_padding", "use_dynamic_bsz", "max_token_len_per_gpu")}
    empty = TensorDict({"input_ids": none, "loss_mask": none, "position_ids": none}, batch_size=[0])
    tu.assign_non_tensor(empty, **flags, temperature=1.0, global_batch_size=1)
    return empty


def share_of(deal: str, rank: int) -> TensorDict:
    """One rank's batch."""
    share = DEALS[deal][rank]
    total = sum(map(len, DEALS[deal]))
    return ppo_batch(share, seed=rank, calculate_entropy=True, global_batch_size=total) if share else empty_batch()


def update(engine: Any, data: TensorDict, loss: Any) -> dict[str, Any]:
    """One forward and backward."""
    engine.optimizer_zero_grad()
    with engine.train_mode(disable_auto_offload=True):
        output = engine.forward_backward_batch(data, loss)
        return {"output": output, "gradients": gradients(engine)}


def join(rank: int, world: int, port: int) -> None:
    """Become one rank of a gloo group."""
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)


def spawn(main: Callable[..., None], world: int, out: Path) -> None:
    """Start one process per rank and wait; a rank's error is raised here."""
    start_ranks(main, world, str(out / "model"), str(out), free_port())


def one_rank(out: Path, deal: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of stock verl that runs all rows of a deal alone, on one rank."""
    engine = build_engine(out / "model", tree=None)
    total = sum(map(len, DEALS[deal]))
    flags = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1, "calculate_entropy": True}
    shares = [(rank, share) for rank, share in enumerate(DEALS[deal]) if share]
    parts = [ppo_batch(share, seed=rank, global_batch_size=total, **flags) for rank, share in shares]
    trained = float(sum(part["loss_mask"].values().sum() for part in parts))
    gradient: dict[str, torch.Tensor] = {}
    loss = 0.0
    for part in parts:
        # Each share weighted by its part of the trained tokens: what token-mean over all ranks is.
        weight = float(part["loss_mask"].values().sum()) / trained
        if weight:
            alone = run(engine, part, actor_loss("vanilla", "token-mean"))
            loss += weight * sum(alone["loss"])
            for name, value in alone["gradients"].items():
                gradient[name] = gradient.get(name, 0) + weight * value
    return loss, gradient


def assert_trains_as_one(results: Path, deal: str, name: str) -> None:
    """What the ranks wrote under a name is what one rank finds for the deal."""
    loss, expected = one_rank(results, deal)
    world = len(DEALS[deal])
    got = [torch.load(results / f"{name}_{rank}.pt") for rank in range(world)]
    # verl averages the losses of ranks, each multiplied by dp_size.
    assert sum(g["loss"] for g in got) / world == pytest.approx(loss, rel=1e-4)
    largest = max(g.norm() for g in expected.values())
    for parameter, reference in expected.items():
        error = (got[0]["gradients"][parameter] - reference).norm()
        assert error <= 4e-5 * max(reference.norm(), 1e-3 * largest), parameter
    metrics = [json.loads((results / f"{name}_{rank}.json").read_text()) for rank in range(world)]
    assert all(one == metrics[0] for one in metrics), "ranks must report metrics that verl can join"
