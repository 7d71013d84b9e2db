"""Two FSDP2 ranks on gloo, of which perhaps one has images, or that share the tokens of rows with images: gradients of
one rank that runs rows alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import build_engine
from equivalence import ALONE, LOSS, run
from image_batches import picture_batch
from image_rows import SHAPES, PictureRow
from rank_engines import empty_batch, join, spawn, update
from transformers import AutoModelForImageTextToText
from wrapped_models import wrapped_config, wrapped_model

from tree_rl.models.own_forwards import restore_own_forwards
from tree_rl.verl_plugin.options import TreeConfig

MIXED, SCREENS = SHAPES["with_and_without_images"], SHAPES["a_sliding_window_of_screens"]
UNEQUAL = "unequal_images"
DEALS: dict[str, tuple[list[PictureRow], list[PictureRow]]] = {
    "images_on_one_rank": (SCREENS, MIXED[1:]),
    "a_rank_without_rows": ([], [*SCREENS, *SHAPES["two_images"]]),
    UNEQUAL: ([*MIXED, *SHAPES["one_image_in_many_places"]], SHAPES["image_in_a_branch"]),
}
SHARED = [*MIXED, *SCREENS, *SHAPES["branch_directly_after_an_image"]]
BUDGETS = (1000, 5)
KEPT = {"reshard_after_forward": False, "use_no_sync_for_gradient_accumulation": False}
RUNS: tuple[tuple[str, dict[str, bool], tuple[str, ...]], ...] = (("", {}, tuple(DEALS)), ("kept_", KEPT, (UNEQUAL,)))
"""Prefix of the results, options of the engine, deals."""


def model_of(path: str | Path) -> Any:
    model = AutoModelForImageTextToText.from_pretrained(path)
    restore_own_forwards(model)
    return model


def rank_main(rank: int, world: int, model: str, out: str, port: int) -> None:
    join(rank, world, port)
    reader = model_of(model)
    for name, engine_options, deals in RUNS:
        engine = build_engine(Path(model), tree=TreeConfig(mode="tree"), engine=engine_options)
        for deal in deals:
            shares = DEALS[deal]
            total = sum(map(len, shares))
            for budget in BUDGETS:
                engine.step.options = TreeConfig(mode="tree", max_tokens=budget)
                flags = {"calculate_entropy": True, "global_batch_size": total}
                share = shares[rank]
                data = picture_batch(reader, share, seed=rank, **flags) if share else empty_batch()
                got = update(engine, data, LOSS)
                torch.save(got["gradients"], f"{out}/{name}{deal}_{budget}_{rank}.pt")
    shared = build_engine(Path(model), tree=TreeConfig(mode="tree"), engine={"ulysses_sequence_parallel_size": 2})
    for budget in BUDGETS:
        shared.step.options = TreeConfig(mode="tree", max_tokens=budget)
        got = update(shared, picture_batch(reader, SHARED, calculate_entropy=True), LOSS)
        torch.save(got["gradients"], f"{out}/shared_{budget}_{rank}.pt")
    torch.distributed.destroy_process_group()


def one_rank(path: Path, shares: tuple[list[PictureRow], ...]) -> dict[str, torch.Tensor]:
    """Gradients of stock verl that runs all rows alone."""
    reader, engine = model_of(path), build_engine(path, tree=None)
    flags = {"calculate_entropy": True, "global_batch_size": sum(map(len, shares)), **ALONE}
    parts = [picture_batch(reader, share, seed=rank, **flags) for rank, share in enumerate(shares) if share]
    trained = sum(float(part["loss_mask"].values().sum()) for part in parts)
    total: dict[str, torch.Tensor] = {}
    for part in parts:
        weight = float(part["loss_mask"].values().sum()) / trained
        for name, gradient in run(engine, part, LOSS)["gradients"].items():
            total[name] = total.get(name, 0) + weight * gradient
    return total


def assert_trained(out: Path, name: str, expected: dict[str, torch.Tensor]) -> None:
    largest = max(float(one.norm()) for one in expected.values())
    for budget in BUDGETS:
        for rank in range(2):
            got = torch.load(out / f"{name}_{budget}_{rank}.pt")
            assert got.keys() == expected.keys()
            for parameter, reference in expected.items():
                error = float((got[parameter] - reference).norm())
                assert error <= 4e-5 * max(float(reference.norm()), 1e-3 * largest), (budget, parameter)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    wrapped_model(wrapped_config("qwen3_vl", initializer_range=0.2)).save_pretrained(path / "model")
    spawn(rank_main, 2, path)
    return path


@pytest.mark.parametrize("deal", DEALS)
def test_two_ranks_train_as_one(out: Path, deal: str) -> None:
    expected = one_rank(out / "model", DEALS[deal])
    assert any("visual" in name for name in expected)
    for name, _, deals in RUNS:
        if deal in deals:
            assert_trained(out, f"{name}{deal}", expected)


def test_ranks_that_share_tokens_train_as_one(out: Path) -> None:
    assert_trained(out, "shared", one_rank(out / "model", (SHARED,)))
