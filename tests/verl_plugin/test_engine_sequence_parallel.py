"""Four ranks that share tokens (`ulysses_sequence_parallel_size`), or replicas of shards (`fsdp_size`), train as stock
verl trains rows alone on one rank: losses, gradients, steps, log-probs, checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import build_engine, save_model, tiny_qwen3
from equivalence import ALONE, assert_equal_gradients, wanted_positions
from layouts_of_four_ranks import (
    CASES,
    LAYOUTS,
    LOSSES,
    SFT,
    SGD,
    SHARING,
    WORLD,
    infer,
    rank_main,
    step,
    update,
    weights_of,
    whole_batch,
    with_whole_masks,
)
from rank_engines import spawn

from tree_rl.verl_plugin.options import TreeConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharing")
    save_model(path / "model", tiny_qwen3())
    spawn(rank_main, WORLD, path)
    return path


@pytest.fixture(scope="module")
def ranks(out: Path) -> list[dict[str, Any]]:
    """What each rank has found."""
    return [torch.load(out / f"rank_{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.fixture(scope="module")
def stock(out: Path) -> Any:
    return build_engine(out / "model", tree=None, optimizer=SGD)


@pytest.fixture(scope="module")
def expected(stock: Any) -> dict[str, dict[str, Any]]:
    """Loss and gradients of each loss."""
    masked = {name: with_whole_masks(whole_batch(**ALONE)) for name in LOSSES if name == SFT}
    return {name: update(stock, masked.get(name, whole_batch(**ALONE)), loss) for name, loss in LOSSES.items()}


def groups(layout: str) -> list[list[int]]:
    """Ranks that hold the same rows, by their place among those with other rows."""
    size = LAYOUTS[layout].get("ulysses_sequence_parallel_size", 1)
    return [list(range(first, first + size)) for first in range(0, WORLD, size)]


def assert_outputs(found: list[dict[str, torch.Tensor]], layout: str, whole: dict[str, torch.Tensor]) -> None:
    """Every rank has all outputs of its rows, those of rows alone."""
    data = whole_batch()
    wanted = torch.nested.nested_tensor_from_jagged(wanted_positions(data), data["input_ids"].offsets()).unbind()
    share_count = len(groups(layout))
    for share, members in enumerate(groups(layout)):
        for rank in members:
            for name, reference in whole.items():
                rows = found[rank][name].unbind()
                for row, mask, alone in zip(
                    rows, wanted[share::share_count], reference.unbind()[share::share_count], strict=True
                ):
                    torch.testing.assert_close(row[mask], alone[mask], rtol=2e-5, atol=2e-5)


def assert_trains_as(reference: dict[str, Any], found: list[dict[str, Any]], layout: str) -> None:
    losses = [found[members[0]]["loss"] for members in groups(layout)]
    # verl averages the losses of ranks with other rows.
    assert sum(losses) / len(losses) == pytest.approx(reference["loss"], rel=1e-4, abs=1e-6)
    for rank in range(WORLD):
        assert_equal_gradients(reference["gradients"], found[rank]["gradients"])


@pytest.mark.parametrize("layout, loss, budget", CASES)
def test_ranks_train_as_rows_alone(
    ranks: list[dict[str, Any]], expected: dict[str, Any], layout: str, loss: str, budget: int | None
) -> None:
    assert_trains_as(expected[loss], [found[layout][loss, budget] for found in ranks], layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_without_rows_keep_step(ranks: list[dict[str, Any]], expected: dict[str, Any], layout: str) -> None:
    assert_trains_as(expected["vanilla"], [found[layout]["one with rows"] for found in ranks], layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_are_those_of_rows_alone(ranks: list[dict[str, Any]], stock: Any, layout: str) -> None:
    assert_outputs([found[layout]["outputs"] for found in ranks], layout, infer(stock, whole_batch(**ALONE)))


@pytest.mark.parametrize("layout", SHARING)
def test_the_first_batch_is_checked_against_rows_that_nobody_shares(ranks: list[dict[str, Any]], layout: str) -> None:
    # Short rows may agree to the last bit on a rank.
    errors = [found[layout]["check"] for found in ranks]
    assert 0 < max(errors) < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_moves_the_weights_as_on_one_rank(ranks: list[dict[str, Any]], out: Path, layout: str) -> None:
    alone = build_engine(out / "model", tree=TreeConfig(mode="tree"), optimizer=SGD)
    before = weights_of(alone)
    for which in ("first", "second"):
        reference = step(alone)
        for found in ranks:
            got = found[layout][which]
            assert got["norm"] == pytest.approx(reference["norm"], rel=1e-5)
            assert got["learning_rate"] == reference["learning_rate"]
            for name, weight in reference["weights"].items():
                moved = (weight - before[name]).norm()
                assert (got["weights"][name] - weight).norm() <= 1e-5 * weight.norm() + 1e-4 * moved, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_brings_back_weights_and_momentum(ranks: list[dict[str, Any]], layout: str) -> None:
    for found in (found[layout] for found in ranks):
        for which in ("loaded", "elsewhere"):
            assert all(torch.equal(found[which][name], weight) for name, weight in found["first"]["weights"].items())
        for name, weight in found["second"]["weights"].items():
            torch.testing.assert_close(found["repeated"]["weights"][name], weight, rtol=1e-6, atol=1e-7)


def test_memory_that_runs_out_among_replicas_is_an_error(ranks: list[dict[str, Any]]) -> None:
    repeats = {layout: [found[layout]["may_repeat"] for found in ranks] for layout in LAYOUTS}
    assert {layout for layout, each in repeats.items() if not all(each)} == {
        layout for layout, options in LAYOUTS.items() if "fsdp_size" in options
    }
