"""Two FSDP2 ranks on gloo with unequal trees: gradients of one rank that runs rows alone; a failing rank says why."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from engine_harness import build_engine, gradients, ppo_batch, save_model, tiny_qwen3
from equivalence import actor_loss, run
from hostile_rows import row, shapes, tokens
from tensordict import TensorDict
from verl.utils.metric import Metric

from tree_rl.verl_plugin.options import TreeConfig

SHAPES = shapes()
DEALS: dict[str, tuple[list[Any], list[Any]]] = {
    "unequal_trees": ([*SHAPES["comb"], *SHAPES["branches"]], [row(tokens(90, 7))]),
    "one_rank_untrained": (SHAPES["branches"], [row(tokens(91, 5), mask=[0, 0, 0])]),
    "one_rank_empty": (SHAPES["branches"], []),
}
BUDGET = 30


def empty_batch() -> TensorDict:
    """A rank's share with no rows."""
    data = ppo_batch([row(tokens(1, 4))])
    none = torch.nested.nested_tensor_from_jagged(torch.zeros(0, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    keep = {"input_ids": none, "loss_mask": none, "position_ids": none}
    flags = {key: data[key] for key in ("use_remove_padding", "use_dynamic_bsz", "max_token_len_per_gpu")}
    from verl.utils import tensordict_utils as tu

    empty = TensorDict(keep, batch_size=[0])
    tu.assign_non_tensor(empty, **flags, temperature=1.0, global_batch_size=1)
    return empty


def rank_main(rank: int, deal: str, model: str, out: str, port: int) -> None:
    """One rank: run its share and save what it got."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    share = DEALS[deal][rank]
    total = len(DEALS[deal][0]) + len(DEALS[deal][1])
    flags = {"calculate_entropy": True, "max_token_len_per_gpu": BUDGET, "global_batch_size": total}
    data = ppo_batch(share, seed=rank, **flags) if share else empty_batch()
    engine = build_engine(Path(model), tree=TreeConfig(mode="tree"))
    engine.optimizer_zero_grad()
    with engine.train_mode(disable_auto_offload=True):
        output = engine.forward_backward_batch(data, actor_loss("vanilla", "token-mean"))
        full = gradients(engine)
    torch.save({"gradients": full, "loss": sum(output["loss"])}, f"{out}/{deal}_{rank}.pt")
    # verl joins Metric objects value by value, so ranks need equally many; plain lists are chained.
    keys = {key: len(m.values) if isinstance(m, Metric) else None for key, m in output["metrics"].items()}
    Path(f"{out}/{deal}_{rank}.json").write_text(json.dumps(keys))
    if deal == "one_rank_empty":
        data["input_ids"].values().fill_(10_000)
        try:
            with engine.train_mode(disable_auto_offload=True):
                engine.forward_backward_batch(data, actor_loss("vanilla", "token-mean"))
        except (RuntimeError, ValueError) as error:
            Path(f"{out}/error_{rank}.txt").write_text(f"{type(error).__name__}: {error}")
    torch.distributed.destroy_process_group()


def all_deals(rank: int, model: str, out: str, port: int) -> None:
    """Every deal in turn in one pair of processes: imports cost more than the runs."""
    sys.path.insert(0, str(Path(__file__).parent))
    for index, deal in enumerate(DEALS):
        rank_main(rank, deal, model, out, port + index)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    save_model(out / "model", tiny_qwen3())
    port = 21000 + os.getpid() % 20000
    torch.multiprocessing.spawn(all_deals, args=(str(out / "model"), str(out), port), nprocs=2, join=True)
    return out


@pytest.mark.parametrize("deal", DEALS)
def test_two_ranks_train_as_one(results: Path, deal: str) -> None:
    shares = DEALS[deal]
    total = len(shares[0]) + len(shares[1])
    engine = build_engine(results / "model", tree=None)
    flags = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1, "calculate_entropy": True}
    parts = [
        ppo_batch(share, seed=rank, global_batch_size=total, **flags) for rank, share in enumerate(shares) if share
    ]
    tokens_in_all = float(sum(part["loss_mask"].values().sum() for part in parts))
    expected: dict[str, torch.Tensor] = {}
    loss = 0.0
    for part in parts:
        # One rank after the other, each weighted by its share of the trained tokens: what token-mean over both is.
        weight = float(part["loss_mask"].values().sum()) / tokens_in_all
        if weight:
            alone = run(engine, part, actor_loss("vanilla", "token-mean"))
            loss += weight * sum(alone["loss"])
            for name, gradient in alone["gradients"].items():
                expected[name] = expected.get(name, 0) + weight * gradient
    got = [torch.load(results / f"{deal}_{rank}.pt") for rank in range(2)]
    # verl averages the losses of ranks, each multiplied by dp_size.
    assert sum(g["loss"] for g in got) / 2 == pytest.approx(loss, rel=1e-4)
    largest = max(g.norm() for g in expected.values())
    for name, reference in expected.items():
        error = (got[0]["gradients"][name] - reference).norm()
        assert error <= 4e-5 * max(reference.norm(), 1e-3 * largest), name


@pytest.mark.parametrize("deal", DEALS)
def test_ranks_report_the_same_metrics(results: Path, deal: str) -> None:
    first, second = (json.loads((results / f"{deal}_{rank}.json").read_text()) for rank in range(2))
    assert first == second


def test_a_rank_that_refuses_its_rows_takes_the_job_down_with_its_own_error(results: Path) -> None:
    assert "token id 10000 is outside the vocabulary" in (results / "error_0.txt").read_text()
    assert "another data-parallel rank refused its rows" in (results / "error_1.txt").read_text()
