"""Four ranks that share tokens (`ulysses_sequence_parallel_size`), or replicas of shards (`fsdp_size`), train as stock
verl trains rows alone on one rank: losses, gradients, steps, log-probs, checkpoints."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import ALONE, build_engine, weights, with_whole_masks
from equivalence import LOSS, assert_equal_gradients, infer, run, wanted_positions
from hostile_rows import whole_batch
from rank_engines import LAYOUTS, empty_batch
from rank_processes import run_ranks
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import sft_loss
from verl_losses import actor_loss

from tree_rl.verl_plugin.options import TreeConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORLD = 4
SFT = "sft"
LOSSES: dict[str, Any] = {
    "vanilla": LOSS,
    "gspo": actor_loss("gspo", "seq-mean-token-mean"),
    SFT: partial(sft_loss, config=None),
}
CASES = [
    *(("sp 2 x dp 2", loss, 13) for loss in ("gspo", SFT)),
    *((layout, "vanilla", budget) for layout in LAYOUTS for budget in (None, 13)),
]
SGD = {"optimizer": "SGD", "lr": 0.5, "weight_decay": 0.0, "override_optimizer_config": {"momentum": 0.9}}
"""Unlike Adam it does not blow up the rounding of gradients near 0."""


def share_of(engine: Any, *, only_first: bool = False) -> TensorDict:
    """This rank's rows of the whole batch; all of them on the first ranks, if the others shall have none."""
    rank, ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    data = whole_batch()
    if only_first:
        return data if rank == 0 else empty_batch()
    return tu.index_select_tensor_dict(data, list(range(rank, len(data), ranks)))


def update(engine: Any, data: TensorDict, loss: str) -> dict[str, Any]:
    got = run(engine, with_whole_masks(data) if loss == SFT else data, LOSSES[loss])
    return {"loss": sum(got["loss"]), "gradients": got["gradients"]}


def step(engine: Any) -> dict[str, Any]:
    """One optimizer step: the norm that it clips, the next learning rate, and the weights after it."""
    with engine.train_mode(disable_auto_offload=True):
        engine.forward_backward_batch(share_of(engine), LOSS)
        norm = engine.optimizer_step()
    return {"norm": norm, "learning_rate": engine.lr_scheduler_step(), "weights": weights(engine)}


def run_policy(model: Path, layout: str, folder: Path) -> dict[str, Any]:
    """Every loss, whole and in partitions, inference, two steps, and a checkpoint between them."""
    engine = build_engine(model, tree=TreeConfig(mode="tree"), engine=LAYOUTS[layout], optimizer=SGD)
    found: dict[str, Any] = {"outputs": infer(engine, share_of(engine)), "check": engine.step.self_check.error}
    for name, budget in [case[1:] for case in CASES if case[0] == layout]:
        engine.step.options = TreeConfig(mode="tree", max_tokens=budget)
        found[name, budget] = update(engine, share_of(engine), name)
    found["one with rows"] = update(engine, share_of(engine, only_first=True), "vanilla")
    engine.optimizer_zero_grad()
    found["first"] = step(engine)
    saved = folder / layout.replace(" ", "_")
    engine.save_checkpoint(str(saved))
    found["second"] = step(engine)
    engine.load_checkpoint(str(saved), del_local_after_load=False)
    found["loaded"] = weights(engine)
    found["repeated"] = step(engine)
    sharded = {name: size for name, size in LAYOUTS[layout].items() if name == "fsdp_size"}
    other = build_engine(model, tree=TreeConfig(mode="tree"), engine=sharded, optimizer=SGD)
    other.load_checkpoint(str(saved), del_local_after_load=False)
    found["elsewhere"] = weights(other)
    found["may_repeat"] = engine.step.context.may_repeat
    return found


def rank_main(rank: int, model: Path, folder: Path) -> dict[str, dict[str, Any]]:
    return {layout: run_policy(model, layout, folder) for layout in LAYOUTS}


@pytest.fixture(scope="module")
def ranks(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(rank_main, WORLD, model_path, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def expected(stock: Any) -> dict[str, dict[str, Any]]:
    return {name: update(stock, whole_batch(**ALONE), name) for name in LOSSES}


@pytest.mark.parametrize("layout, loss, budget", CASES)
def test_ranks_train_as_rows_alone(
    ranks: list[dict[str, Any]], expected: dict[str, Any], layout: str, loss: str, budget: int | None
) -> None:
    for update_of_rank, name in (((loss, budget), loss), ("one with rows", "vanilla")):
        found = [of_rank[layout][update_of_rank] for of_rank in ranks]
        # verl averages the losses of ranks with other rows; those that share tokens have the same.
        mean = sum(one["loss"] for one in found) / WORLD
        assert mean == pytest.approx(expected[name]["loss"], rel=1e-4, abs=1e-6)
        for one in found:
            assert_equal_gradients(expected[name]["gradients"], one["gradients"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_are_those_of_rows_alone(ranks: list[dict[str, Any]], stock: Any, layout: str) -> None:
    data, whole = whole_batch(), infer(stock, whole_batch(**ALONE))
    wanted = torch.nested.nested_tensor_from_jagged(wanted_positions(data), data["input_ids"].offsets()).unbind()
    sharing = LAYOUTS[layout].get("ulysses_sequence_parallel_size", 1)
    for rank, name in product(range(WORLD), whole):
        mine = slice(rank // sharing, None, WORLD // sharing)
        outputs = ranks[rank][layout]["outputs"][name].unbind()
        for row, mask, alone in zip(outputs, wanted[mine], whole[name].unbind()[mine], strict=True):
            torch.testing.assert_close(row[mask], alone[mask], rtol=2e-5, atol=2e-5)
    if sharing > 1:
        # Rows that nobody shares checked the first batch; short ones may agree to the last bit on a rank.
        assert 0 < max(found[layout]["check"] for found in ranks) < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_moves_the_weights_as_on_one_rank(ranks: list[dict[str, Any]], model_path: Path, layout: str) -> None:
    alone = build_engine(model_path, tree=TreeConfig(mode="tree"), optimizer=SGD)
    before = weights(alone)
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
        # Memory that runs out among replicas is an error.
        assert found["may_repeat"] == ("fsdp_size" not in LAYOUTS[layout])
