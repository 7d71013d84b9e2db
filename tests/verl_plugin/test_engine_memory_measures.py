"""Under FSDP2 on 2 ranks layer inputs on the host change no bit of a gradient, and tiles no more than rounding."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from engine_harness import build_engine, save_model, tiny_qwen3
from equivalence import LOSS, assert_equal_gradients, run
from rank_engines import join, share_of, spawn

from tree_rl.cost.memory.model import MemorySaving
from tree_rl.training.memory.host_slab import host_slab
from tree_rl.training.planner import Planner, StepPlan
from tree_rl.verl_plugin.options import TreeConfig

CASES = [("unequal_trees", None), ("one_rank_empty", 9)]
MODELS: dict[str, dict[str, Any]] = {"dense": {}, "lora": {"lora_rank": 2, "target_modules": "all-linear"}}


@contextmanager
def taking(saving: MemorySaving) -> Iterator[None]:
    plan_of = Planner.plan

    def plan(*asked: Any, **flags: Any) -> StepPlan:
        plan = plan_of(*asked, **flags)
        return replace(plan, batches=tuple(replace(batch, saving=saving) for batch in plan.batches))

    Planner.plan = plan  # type: ignore[method-assign]
    try:
        yield
    finally:
        Planner.plan = plan_of  # type: ignore[method-assign]


def measured_main(rank: int, world: int, model: str, out: str, port: int) -> None:
    """Each deal without a way to save memory, with each and with all."""
    join(rank, world, port)
    offloaded_bytes = {}
    for name, settings in MODELS.items():
        engine = build_engine(
            Path(model), tree=TreeConfig(mode="tree"), model={"enable_gradient_checkpointing": True, **settings}
        )
        for deal, budget in CASES:
            engine.tree_config = engine.step.options = TreeConfig(mode="tree", max_tokens=budget, self_check=False)

            def gradients(saving: MemorySaving, deal: str = deal, engine: Any = engine) -> dict[str, torch.Tensor]:
                with taking(saving):
                    return run(engine, share_of(deal, rank), LOSS)["gradients"]

            plain = gradients(MemorySaving())
            host_slab(torch.device("cpu")).release()
            offloaded = gradients(MemorySaving(offloaded_layers=2))
            offloaded_bytes[f"{name} {deal} {budget}"] = host_slab(torch.device("cpu")).num_bytes
            for parameter, gradient in plain.items():
                assert torch.equal(gradient, offloaded[parameter]), (name, deal, budget, parameter)
            assert_equal_gradients(plain, gradients(MemorySaving(tile_tokens=1, offloaded_layers=1)))
    Path(f"{out}/bytes_{rank}.json").write_text(json.dumps(offloaded_bytes))
    torch.distributed.destroy_process_group()


def test_ranks_that_save_memory_train_as_before(tmp_path: Path) -> None:
    save_model(tmp_path / "model", tiny_qwen3())
    spawn(measured_main, 2, tmp_path)
    busy, other = (json.loads((tmp_path / f"bytes_{rank}.json").read_text()) for rank in range(2))
    assert all(busy.values())
    # Dummies that keep an empty rank in step stay on the device.
    assert all(bool(size) == ("unequal_trees" in case) for case, size in other.items())
