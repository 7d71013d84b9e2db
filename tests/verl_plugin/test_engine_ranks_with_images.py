"""Two FSDP2 ranks on gloo, of which perhaps one has images, or that share the tokens of rows with images: gradients of
one rank that runs rows alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import build_engine
from equivalence import ALONE, LOSS, run
from image_batches import picture_batch, reading_model
from image_rows import SHAPES, PictureRow
from rank_engines import as_one_rank, assert_gradients_of_ranks, empty_batch
from rank_processes import run_ranks
from tensordict import TensorDict
from wrapped_models import wrapped_config, wrapped_model

from tree_rl.verl_plugin.options import TreeConfig

MIXED, SCREENS = SHAPES["with_and_without_images"], SHAPES["a_sliding_window_of_screens"]
DEALS: dict[str, tuple[list[PictureRow], ...]] = {
    "images_on_one_rank": (SCREENS, MIXED[1:]),
    "a_rank_without_rows": ([], [*SCREENS, *SHAPES["two_images"]]),
    "unequal_images": ([*MIXED, *SHAPES["one_image_in_many_places"]], SHAPES["image_in_a_branch"]),
    "shared_tokens": ([*MIXED, *SCREENS, *SHAPES["branch_directly_after_an_image"]],),
}
BUDGETS = (1000, 5)
KEPT = {"reshard_after_forward": False, "use_no_sync_for_gradient_accumulation": False}
RUNS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("", {}, ("images_on_one_rank", "a_rank_without_rows", "unequal_images")),
    ("kept_", KEPT, ("unequal_images",)),
    ("", {"ulysses_sequence_parallel_size": 2}, ("shared_tokens",)),
)
"""Prefix of the results, options of the engine, deals."""


def batch_of(reader: Any, deal: str, share: int, **flags: Any) -> TensorDict:
    rows, total = DEALS[deal][share], sum(map(len, DEALS[deal]))
    settings = {"calculate_entropy": True, "global_batch_size": total, **flags}
    return picture_batch(reader, rows, seed=share, **settings) if rows else empty_batch()


def rank_main(rank: int, model: Path) -> dict[str, dict[str, torch.Tensor]]:
    reader, found = reading_model(model), {}
    for name, options, deals in RUNS:
        engine = build_engine(model, tree=TreeConfig(mode="tree"), engine=options)
        for deal in deals:
            for budget in BUDGETS:
                engine.step.options = TreeConfig(mode="tree", max_tokens=budget)
                got = run(engine, batch_of(reader, deal, rank % len(DEALS[deal])), LOSS)
                found[f"{name}{deal}_{budget}"] = got["gradients"]
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    wrapped_model(wrapped_config("qwen3_vl", initializer_range=0.2)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def two_ranks(model: Path) -> list[dict[str, dict[str, torch.Tensor]]]:
    return run_ranks(rank_main, 2, model)


@pytest.mark.parametrize("deal", DEALS)
def test_two_ranks_train_as_one(model: Path, two_ranks: list[dict[str, dict[str, torch.Tensor]]], deal: str) -> None:
    reader = reading_model(model)
    parts = [batch_of(reader, deal, share, **ALONE) for share, rows in enumerate(DEALS[deal]) if rows]
    _, expected = as_one_rank(model, parts)
    assert any("visual" in name for name in expected)
    for name in [f"{name}{deal}_{budget}" for name, _, deals in RUNS if deal in deals for budget in BUDGETS]:
        for gradients_of in two_ranks:
            assert_gradients_of_ranks(expected, gradients_of[name])
