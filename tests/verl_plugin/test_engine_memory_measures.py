"""Under FSDP2 on 2 ranks layer inputs on the host change no bit of a gradient, and tiles no more than rounding."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed
from engine_harness import build_engine
from equivalence import LOSS, assert_equal_gradients, run
from rank_engines import DEALS, share_of
from rank_processes import run_ranks

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

    for deal, budget in (("unequal_trees", None), ("one_rank_empty", 9)):
        engine.tree_config = engine.step.options = TreeConfig(mode="tree", max_tokens=budget, self_check=False)
        plain = gradients(deal)
        host_slab(torch.device("cpu")).release()
        offloaded = gradients(deal, offloaded_layers=2)
        # Dummies that keep an empty rank in step stay on the device.
        assert bool(host_slab(torch.device("cpu")).num_bytes) == bool(DEALS[deal][rank])
        for parameter, gradient in plain.items():
            assert torch.equal(gradient, offloaded[parameter]), (deal, budget, parameter)
        assert_equal_gradients(plain, gradients(deal, tile_tokens=1, offloaded_layers=1))


def test_gradients_and_moments_on_the_host_take_no_device_memory() -> None:
    for device, values in (("meta", 8), ("cpu", 0)):
        linear = torch.nn.Linear(2, 4, bias=False, device=device)
        assert gradients_to_come(linear) == 4 * values
        assert moments_to_come(linear, torch.optim.AdamW(linear.parameters())) == 2 * 4 * values


def test_ranks_that_save_memory_train_as_before(model_path: Path) -> None:
    run_ranks(measured_main, 2, model_path)
