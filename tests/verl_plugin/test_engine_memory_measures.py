"""Under FSDP2 on 2 ranks layer inputs on the host change no bit of a gradient, and tiles no more than rounding."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from engine_harness import build_engine, save_model, tiny_qwen3
from equivalence import actor_loss, assert_equal_gradients
from rank_engines import join, share_of, spawn, update

from tree_rl.cost.memory.model import MemorySaving
from tree_rl.training.memory.host_slab import host_slab
from tree_rl.training.planner import Planner, StepPlan
from tree_rl.verl_plugin.options import TreeConfig

CASES = [("unequal_trees", None), ("one_rank_empty", 9)]
MODELS: dict[str, dict[str, Any]] = {"dense": {}, "lora": {"lora_rank": 2, "target_modules": "all-linear"}}


@contextmanager
def taking(saving: MemorySaving) -> Iterator[None]:
    """Every forest of this process takes these saving."""
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
                    got = update(engine, share_of(deal, rank), actor_loss("vanilla", "token-mean"))["gradients"]
                return got

            plain = gradients(MemorySaving())
            host_slab(torch.device("cpu")).release()
            offloaded = gradients(MemorySaving(offloaded_layers=2))
            offloaded_bytes[f"{name} {deal} {budget}"] = host_slab(torch.device("cpu")).num_bytes
            for parameter, gradient in plain.items():
                assert torch.equal(gradient, offloaded[parameter]), (name, deal, budget, parameter)
            assert_equal_gradients(plain, gradients(MemorySaving(tile_tokens=1, offloaded_layers=1)))
    Path(f"{out}/bytes_{rank}.json").write_text(json.dumps(offloaded_bytes))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def host_bytes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    out = tmp_path_factory.mktemp("saving")
    save_model(out / "model", tiny_qwen3())
    spawn(measured_main, 2, out)
    return [json.loads((out / f"bytes_{rank}.json").read_text()) for rank in range(2)]


def test_ranks_that_save_memory_train_as_before(host_bytes: list[dict[str, int]]) -> None:
    busy, other = host_bytes
    assert all(busy.values())
    # Dummies that keep an empty rank in step stay on the device.
    assert not any(size for case, size in other.items() if "one_rank_empty" in case)
    assert all(size for case, size in other.items() if "unequal_trees" in case)
