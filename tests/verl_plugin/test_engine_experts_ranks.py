"""Two FSDP2 ranks with unequal trees of a Mixture-of-Experts model: gradients and auxiliary loss of all rows on one."""

from pathlib import Path

import pytest
import torch
from engine_harness import build_engine, save_model
from equivalence import actor_loss, assert_equal_gradients
from rank_engines import DEALS, join, one_rank, share_of, spawn, update
from routed_rows import move_weights, stock_run
from tiny_families import COEF, CONFIGS, auxiliary_gradients
from verl.workers.config.engine import EngineRouterReplayConfig

from tree_rl.verl_plugin.options import TreeConfig

SHARES = ("unequal_trees", "one_rank_empty")
BUDGETS = (30, 5)


def rank_main(rank: int, world: int, model: str, out: str, port: int) -> None:
    """Run this rank's share with every budget."""
    join(rank, world, port)
    engine = build_engine(Path(model), tree=TreeConfig(router_aux_loss_coef=COEF))
    for deal in SHARES:
        for budget in BUDGETS:
            engine.step.options = TreeConfig(max_tokens=budget, router_aux_loss_coef=COEF)
            got = update(engine, share_of(deal, rank), actor_loss("vanilla", "token-mean"))
            metrics = {
                key: float(m.aggregate()) for key, m in got["output"]["metrics"].items() if key.startswith("moe/")
            }
            torch.save({"gradients": got["gradients"], "metrics": metrics}, f"{out}/{deal}_{budget}_{rank}.pt")
    replaying = build_engine(
        Path(model),
        tree=TreeConfig(max_tokens=20),
        engine={"router_replay": EngineRouterReplayConfig(mode="R2")},
    )
    with replaying.eval_mode(disable_auto_offload=True):
        recorded = replaying.infer_batch(share_of("one_rank_empty", rank))["model_output"]
    move_weights(replaying)
    data = share_of("one_rank_empty", rank)
    if "routed_experts" in recorded:
        data["routed_experts"] = recorded["routed_experts"]
    got = update(replaying, data, actor_loss("vanilla", "token-mean"))
    torch.save({"gradients": got["gradients"], **recorded}, f"{out}/replayed_{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    save_model(path / "model", CONFIGS["qwen3_moe"])
    spawn(rank_main, 2, path)
    return path


def test_a_rank_without_rows_keeps_step_with_one_that_repeats_routes(results: Path) -> None:
    got = [torch.load(results / f"replayed_{rank}.pt", weights_only=False) for rank in range(2)]
    routes = [row.numpy() for row in got[0]["routed_experts"].unbind()]
    stock = build_engine(results / "model", tree=None)
    move_weights(stock)
    expected = stock_run(stock, DEALS["one_rank_empty"][0], routes)["gradients"]
    assert "routed_experts" not in got[1]
    assert_equal_gradients(expected, got[0]["gradients"])


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("deal", SHARES)
def test_two_ranks_train_as_one(results: Path, deal: str, budget: int) -> None:
    _, expected = one_rank(results, deal)
    value, auxiliary = auxiliary_gradients(results / "model", [row for share in DEALS[deal] for row in share])
    got = [torch.load(results / f"{deal}_{budget}_{rank}.pt") for rank in range(2)]
    assert_equal_gradients({n: g + COEF * auxiliary[n] for n, g in expected.items()}, got[0]["gradients"])
    # verl averages sums over ranks.
    assert sum(one["metrics"].pop("moe/aux_loss") for one in got) / 2 == pytest.approx(value, rel=1e-5)
    assert got[0]["metrics"] == got[1]["metrics"]
