"""Ways to save memory, and memory that runs out on a rank wherever in a step, leave the update on two ranks as it is.

The allocator's error is raised by hand in the middle of a layer; tests on a GPU bring it about.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed
from engine_harness import build_engine, ppo_batch
from equivalence import LOSS, assert_equal_gradients, infer, run
from failing_memory import fail_once
from rank_engines import COMB, DEALS, share_of
from rank_processes import run_ranks

from tree_rl.cost.memory import budget
from tree_rl.cost.memory.model import MemorySaving
from tree_rl.training.memory.host_slab import host_slab
from tree_rl.training.memory_budget import gradients_to_come
from tree_rl.training.planner import Planner, StepPlan
from tree_rl.verl_plugin.engine.build import moments_to_come
from tree_rl.verl_plugin.options import TreeConfig


def measured_main(rank: int, model: Path) -> None:
    """Each deal without a way to save memory, with each and with all."""
    engine = build_engine(model, tree=TreeConfig(mode="tree"), model={"enable_gradient_checkpointing": True})
    plan_of = Planner.plan

    def gradients(deal: str, **saving: int) -> dict[str, torch.Tensor]:
        """Of a step whose forests all take this saving."""

        def plan(*asked: Any, **flags: Any) -> StepPlan:
            plan = plan_of(*asked, **flags)
            batches = (replace(batch, saving=MemorySaving(**saving)) for batch in plan.batches)
            return replace(plan, batches=tuple(batches))

        with patch.object(Planner, "plan", plan):
            return run(engine, share_of(deal, rank), LOSS)["gradients"]

    for deal, most in (("unequal_trees", None), ("one_rank_empty", 9)):
        engine.tree_config = engine.step.options = TreeConfig(mode="tree", max_tokens=most, self_check=False)
        plain = gradients(deal)
        host_slab(torch.device("cpu")).release()
        offloaded = gradients(deal, offloaded_layers=2)
        # Dummies that keep an empty rank in step stay on the device.
        assert bool(host_slab(torch.device("cpu")).num_bytes) == bool(DEALS[deal][rank])
        for parameter, gradient in plain.items():
            assert torch.equal(gradient, offloaded[parameter]), (deal, most, parameter)
        assert_equal_gradients(plain, gradients(deal, tile_tokens=1, offloaded_layers=1))


def test_gradients_and_moments_on_the_host_take_no_device_memory() -> None:
    for device, values in (("meta", 8), ("cpu", 0)):
        linear = torch.nn.Linear(2, 4, bias=False, device=device)
        assert gradients_to_come(linear) == 4 * values
        assert moments_to_come(linear, torch.optim.AdamW(linear.parameters())) == 2 * 4 * values


def test_ranks_that_save_memory_train_as_before(model_path: Path) -> None:
    run_ranks(measured_main, 2, model_path)


CASES = [
    ("both_work", True, [("forward", 0), ("backward", 2)]),
    ("one_rank_empty", False, [("forward", 2), ("backward", 0)]),
]
"""(deal, whether weights are sharded again between forward and backward, points).

A point: the failure comes in the pass of that direction through the last layer after so many others."""


def engine_of(path: Path, **fsdp: Any) -> Any:
    return build_engine(path, tree=TreeConfig(mode="tree", max_tokens=12, self_check=False), engine=fsdp)


def rank_main(rank: int, model: Path) -> None:
    """Undisturbed updates, then the same with rank 0 failing at every point."""
    budget.GRANULARITY = 3
    for deal, reshard, points in CASES:
        engine = engine_of(model, reshard_after_forward=reshard)
        expected = run(engine, share_of(deal, rank), LOSS)["gradients"]
        for direction, passes in points:
            disarm = fail_once(engine.module, direction, passes)[1] if rank == 0 else lambda: None
            engine.step.out_of_memory = 0
            got = run(engine, share_of(deal, rank), LOSS)
            disarm()
            assert engine.step.out_of_memory == got["metrics"]["tree/out_of_memory"].aggregate() == 1
            assert_equal_gradients(expected, got["gradients"])
            engine.step.learner.budget.tokens = None


def test_two_ranks_repeat_the_step_together(model_path: Path) -> None:
    run_ranks(rank_main, 2, model_path)


def test_inference_is_repeated_too(model_path: Path) -> None:
    engine = engine_of(model_path)
    data = ppo_batch(COMB, calculate_entropy=True)
    expected = infer(engine, data)["log_probs"].values()
    fail_once(engine.module, "forward", 1)
    got = infer(engine, data)["log_probs"].values()
    assert engine.step.out_of_memory == 1
    torch.testing.assert_close(got, expected)


def test_a_second_failure_ends_the_run_and_names_the_key(model_path: Path) -> None:
    engine = engine_of(model_path)
    for _ in range(2):
        fail_once(engine.module, "forward", 0)
    with pytest.raises(torch.cuda.OutOfMemoryError) as failure:
        run(engine, ppo_batch(COMB, calculate_entropy=True), LOSS)
    assert "lower tree.max_tokens" in failure.value.__notes__[0]


def test_gradients_of_an_earlier_call_are_never_lost(model_path: Path) -> None:
    engine = engine_of(model_path)
    engine.optimizer_zero_grad()
    with pytest.raises(torch.cuda.OutOfMemoryError), engine.train_mode(disable_auto_offload=True):
        engine.forward_backward_batch(ppo_batch(COMB, calculate_entropy=True), LOSS)
        fail_once(engine.module, "forward", 1)
        engine.forward_backward_batch(ppo_batch(COMB, calculate_entropy=True), LOSS)
