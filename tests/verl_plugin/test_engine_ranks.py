"""2 and 4 FSDP2 ranks on gloo with unequal trees: gradients of one rank that runs rows alone; failures say why."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from engine_harness import build_engine, ppo_batch, save_model, tiny_qwen3
from equivalence import actor_loss
from rank_engines import BRANCHES, DEALS, assert_trains_as_one, empty_batch, join, share_of, spawn, update
from verl.utils.metric import Metric

from tree_rl.verl_plugin.engine.rows_in import read_rows
from tree_rl.verl_plugin.options import TreeConfig

BUDGETS = (30, 5)
TWO = [name for name, shares in DEALS.items() if len(shares) == 2]
FOUR = [name for name, shares in DEALS.items() if len(shares) == 4]
CASES = [(name, budget) for name in DEALS for budget in BUDGETS]


def test_a_share_without_rows_has_no_positions() -> None:
    rows = read_rows(empty_batch(), vocab_size=10, max_positions=None)
    assert rows.num_rows == 0
    assert len(rows.token_ids_F) == len(rows.wanted_F) == len(rows.counted_F) == 0


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


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ranks leave results; the model's head is an FSDP2 module of its own, which answers with log-probs."""
    path = tmp_path_factory.mktemp("ranks")
    save_model(path / "model", tiny_qwen3(tie_word_embeddings=False))
    return path


@pytest.fixture(scope="module")
def two_ranks(out: Path) -> Path:
    spawn(rank_main, 2, out)
    return out


@pytest.fixture(scope="module")
def four_ranks(out: Path) -> Path:
    spawn(rank_main, 4, out)
    return out


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
