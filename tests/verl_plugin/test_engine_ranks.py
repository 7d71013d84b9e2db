"""2 and 4 FSDP2 ranks on gloo with unequal trees: gradients of one rank that runs rows alone; failures say why."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from engine_harness import build_engine, gradients, ppo_batch, save_model, tiny_qwen3
from equivalence import actor_loss, run
from hostile_rows import row, shapes, tokens
from rank_processes import free_port, start_ranks
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric

from tree_rl.verl_plugin.engine.rows_in import read_rows
from tree_rl.verl_plugin.options import TreeConfig

SHAPES = shapes()
COMB, BRANCHES, DEEP = SHAPES["comb"], SHAPES["branches"], SHAPES["branch_at_63_64_65"]
DEALS: dict[str, list[list[Any]]] = {
    "unequal_trees": [[*COMB, *BRANCHES], [row(tokens(90, 7))]],
    "one_rank_untrained": [BRANCHES, [row(tokens(91, 5), mask=[0, 0, 0])]],
    "one_rank_empty": [BRANCHES, []],
    "four_unequal": [DEEP, [row(tokens(92, 5))], [*COMB, *BRANCHES], BRANCHES],
    "four_two_empty": [[], DEEP, [], COMB],
}
BUDGETS = (30, 5)
TWO = [name for name, shares in DEALS.items() if len(shares) == 2]
FOUR = [name for name, shares in DEALS.items() if len(shares) == 4]
CASES = [(name, budget) for name in DEALS for budget in BUDGETS]


def empty_batch() -> TensorDict:
    """A rank's share with no rows."""
    data = ppo_batch([row(tokens(1, 4))])
    none = torch.nested.nested_tensor_from_jagged(torch.zeros(0, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    flags = {key: data[key] for key in ("use_remove_padding", "use_dynamic_bsz", "max_token_len_per_gpu")}
    empty = TensorDict({"input_ids": none, "loss_mask": none, "position_ids": none}, batch_size=[0])
    tu.assign_non_tensor(empty, **flags, temperature=1.0, global_batch_size=1)
    return empty


def test_a_share_without_rows_has_no_positions() -> None:
    rows = read_rows(empty_batch(), vocab_size=10, max_positions=None)
    assert rows.num_rows == 0
    assert len(rows.token_ids_F) == len(rows.wanted_F) == len(rows.counted_F) == 0


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


def rank_main(rank: int, world: int, model: str, out: str, port: int) -> None:
    """Run this rank's share of every deal of that many ranks; imports cost more than the runs."""
    join(rank, world, port)
    engine = build_engine(Path(model), tree=TreeConfig(mode="tree"))
    for deal, budget in CASES:
        if len(DEALS[deal]) != world:
            continue
        engine.step.options = TreeConfig(mode="tree", max_tokens=budget)
        got = update(engine, share_of(deal, rank), actor_loss("vanilla", "token-mean"))
        torch.save(
            {"gradients": got["gradients"], "loss": sum(got["output"]["loss"])}, f"{out}/{deal}_{budget}_{rank}.pt"
        )
        # verl joins Metric objects value by value, so ranks need equally many; plain lists are chained.
        metrics = got["output"]["metrics"]
        keys = {key: len(m.values) if isinstance(m, Metric) else None for key, m in metrics.items()}
        Path(f"{out}/{deal}_{budget}_{rank}.json").write_text(json.dumps(keys))
    if world == 2:
        data = share_of("one_rank_empty", rank)
        data["input_ids"].values().fill_(10_000)
        try:
            update(engine, data, actor_loss("vanilla", "token-mean"))
        except (RuntimeError, ValueError) as error:
            Path(f"{out}/error_{rank}.txt").write_text(f"{type(error).__name__}: {error}")
    torch.distributed.destroy_process_group()


def failing_main(rank: int, world: int, model: str, out: str, port: int) -> None:
    """The last rank's loss fails in the middle of the step, while the others wait in a collective."""
    join(rank, world, port)
    engine = build_engine(Path(model), tree=TreeConfig(mode="tree", max_tokens=7))

    def failing(**kwargs: Any) -> Any:
        raise ArithmeticError("the reward model returned nonsense")

    loss: Callable[..., Any] = failing if rank == world - 1 else actor_loss("vanilla", "token-mean")
    update(engine, ppo_batch(BRANCHES, calculate_entropy=True), loss)


def spawn(main: Callable[..., None], world: int, out: Path) -> None:
    """Start one process per rank and wait; a rank's error is raised here."""
    start_ranks(main, world, str(out / "model"), str(out), free_port())


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    save_model(path / "model", tiny_qwen3())
    return path


@pytest.fixture(scope="module")
def two_ranks(out: Path) -> Path:
    spawn(rank_main, 2, out)
    return out


@pytest.fixture(scope="module")
def four_ranks(out: Path) -> Path:
    spawn(rank_main, 4, out)
    return out


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


def assert_trains_as_one(results: Path, deal: str, budget: int) -> None:
    loss, expected = one_rank(results, deal)
    world = len(DEALS[deal])
    got = [torch.load(results / f"{deal}_{budget}_{rank}.pt") for rank in range(world)]
    # verl averages the losses of ranks, each multiplied by dp_size.
    assert sum(g["loss"] for g in got) / world == pytest.approx(loss, rel=1e-4)
    largest = max(g.norm() for g in expected.values())
    for name, reference in expected.items():
        error = (got[0]["gradients"][name] - reference).norm()
        assert error <= 4e-5 * max(reference.norm(), 1e-3 * largest), name
    metrics = [json.loads((results / f"{deal}_{budget}_{rank}.json").read_text()) for rank in range(world)]
    assert all(one == metrics[0] for one in metrics), "ranks must report metrics that verl can join"


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("deal", TWO)
def test_two_ranks_train_as_one(two_ranks: Path, deal: str, budget: int) -> None:
    assert_trains_as_one(two_ranks, deal, budget)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("deal", FOUR)
def test_four_ranks_train_as_one(four_ranks: Path, deal: str, budget: int) -> None:
    assert_trains_as_one(four_ranks, deal, budget)


def test_a_rank_that_refuses_its_rows_takes_the_job_down_with_its_own_error(two_ranks: Path) -> None:
    assert "token id 10000 is outside the vocabulary" in (two_ranks / "error_0.txt").read_text()
    assert "another data-parallel rank refused its rows" in (two_ranks / "error_1.txt").read_text()


def test_a_rank_that_fails_within_a_step_takes_the_job_down_with_its_own_error(out: Path) -> None:
    # gloo alone would give up after 30 minutes, beyond the time limit of a test.
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="the reward model returned nonsense"):
        spawn(failing_main, 2, out)
