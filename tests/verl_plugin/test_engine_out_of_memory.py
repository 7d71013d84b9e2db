"""A rank that runs out of memory, wherever in a step: all ranks repeat it together, and the update stays the same.

The allocator's error is raised by hand in the middle of a layer; tests on a GPU bring it about.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import build_engine, ppo_batch, save_model, tiny_qwen3
from equivalence import LOSS, assert_equal_gradients, infer, run
from failing_memory import fail_once
from rank_engines import COMB, join, share_of, spawn

from tree_rl.cost.memory import budget
from tree_rl.verl_plugin.options import TreeConfig

BUDGET = 12
POINTS = [(direction, passes) for direction in ("forward", "backward") for passes in (0, 2)]
"""(direction, passes): the failure comes in the pass of that direction through the last layer after so many others."""
DEALS = {"both_work": True, "one_rank_empty": False}
"""Deal: whether weights are sharded again between forward and backward."""


def engine_of(path: Path, **fsdp: Any) -> Any:
    return build_engine(path, tree=TreeConfig(mode="tree", max_tokens=BUDGET, self_check=False), engine=fsdp)


def rank_main(rank: int, world: int, model: str, out: str, port: int) -> None:
    """Undisturbed updates, then the same with rank 0 failing at every point."""
    join(rank, world, port)
    budget.GRANULARITY = 3
    for deal, reshard in DEALS.items():
        engine = engine_of(Path(model), reshard_after_forward=reshard)
        expected = run(engine, share_of(deal, rank), LOSS)["gradients"]
        for direction, passes in POINTS:
            disarm = fail_once(engine.module, direction, passes)[1] if rank == 0 else lambda: None
            engine.step.out_of_memory = 0
            got = run(engine, share_of(deal, rank), LOSS)
            disarm()
            case = f"{deal}_{direction}_{passes}_{rank}"
            torch.save({"got": got["gradients"], "expected": expected}, f"{out}/{case}.pt")
            count = got["metrics"]["tree/out_of_memory"].aggregate()
            Path(f"{out}/{case}.json").write_text(json.dumps([engine.step.out_of_memory, count]))
            engine.step.learner.budget.tokens = None
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("out_of_memory")
    save_model(path / "model", tiny_qwen3())
    return path


@pytest.fixture(scope="module")
def two_ranks(out: Path) -> Path:
    spawn(rank_main, 2, out)
    return out


@pytest.mark.parametrize(("direction", "passes"), POINTS)
@pytest.mark.parametrize("deal", DEALS)
def test_two_ranks_repeat_the_step_together(two_ranks: Path, deal: str, direction: str, passes: int) -> None:
    for rank in (0, 1):
        case = two_ranks / f"{deal}_{direction}_{passes}_{rank}"
        runs = torch.load(case.with_suffix(".pt"))
        assert json.loads(case.with_suffix(".json").read_text()) == [1, 1.0]
        assert_equal_gradients(runs["expected"], runs["got"])


def test_inference_is_repeated_too(out: Path) -> None:
    engine = engine_of(out / "model")
    data = ppo_batch(COMB, calculate_entropy=True)
    expected = infer(engine, data)["log_probs"].values()
    fail_once(engine.module, "forward", 1)
    got = infer(engine, data)["log_probs"].values()
    assert engine.step.out_of_memory == 1
    torch.testing.assert_close(got, expected)


def test_a_second_failure_ends_the_run_and_names_the_key(out: Path) -> None:
    engine = engine_of(out / "model")
    for _ in range(2):
        fail_once(engine.module, "forward", 0)
    with pytest.raises(torch.cuda.OutOfMemoryError) as failure:
        run(engine, ppo_batch(COMB, calculate_entropy=True), LOSS)
    assert "lower tree.max_tokens" in failure.value.__notes__[0]


def test_gradients_of_an_earlier_call_are_never_lost(out: Path) -> None:
    engine = engine_of(out / "model")
    engine.optimizer_zero_grad()
    with pytest.raises(torch.cuda.OutOfMemoryError), engine.train_mode(disable_auto_offload=True):
        engine.forward_backward_batch(ppo_batch(COMB, calculate_entropy=True), LOSS)
        fail_once(engine.module, "forward", 1)
        engine.forward_backward_batch(ppo_batch(COMB, calculate_entropy=True), LOSS)
