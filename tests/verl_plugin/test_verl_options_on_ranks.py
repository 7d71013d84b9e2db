"""verl's options of sharding, on two ranks of which one runs dummies: gradients of one rank that runs rows alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import build_engine, save_model, tiny_qwen3
from equivalence import actor_loss
from rank_engines import join, one_rank, share_of, spawn, update

from tree_rl.verl_plugin.options import TreeConfig

DEAL = "unequal_trees"
OPTIONS: dict[str, dict[str, Any]] = {
    "forward_prefetch and wrap_policy": {
        "engine": {
            "forward_prefetch": True,
            "wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen3Attention", "Qwen3MLP"]},
        },
        "model": {"enable_gradient_checkpointing": True},
    },
    "fsdp_size": {"engine": {"fsdp_size": 1}},
    "reshard_after_forward and use_no_sync_for_gradient_accumulation": {
        "engine": {"reshard_after_forward": False, "use_no_sync_for_gradient_accumulation": False}
    },
}


def rank_main(rank: int, world: int, model: str, out: str, port: int) -> None:
    """Run this rank's share under every option."""
    join(rank, world, port)
    for option, build in OPTIONS.items():
        engine = build_engine(Path(model), tree=TreeConfig(mode="tree", max_tokens=30), **build)
        got = update(engine, share_of(DEAL, rank), actor_loss("vanilla", "token-mean"))
        torch.save({"gradients": got["gradients"], "loss": sum(got["output"]["loss"])}, f"{out}/{option}_{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    save_model(path / "model", tiny_qwen3())
    spawn(rank_main, 2, path)
    return path


@pytest.fixture(scope="module")
def expected(out: Path) -> tuple[float, dict[str, torch.Tensor]]:
    return one_rank(out, DEAL)


@pytest.mark.parametrize("option", OPTIONS)
def test_two_ranks_train_as_one(out: Path, expected: tuple[float, dict[str, torch.Tensor]], option: str) -> None:
    loss, gradients = expected
    got = [torch.load(out / f"{option}_{rank}.pt") for rank in range(2)]
    assert sum(each["loss"] for each in got) / 2 == pytest.approx(loss, rel=1e-4)
    largest = max(gradient.norm() for gradient in gradients.values())
    for name, reference in gradients.items():
        error = (got[0]["gradients"][name] - reference).norm()
        assert error <= 4e-5 * max(reference.norm(), 1e-3 * largest), name
