"""Two FSDP2 ranks on gloo with unequal trees: gradients of one rank that runs rows alone; failures say why."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from engine_harness import build_engine, ppo_batch, save_model, tiny_qwen3
from equivalence import LOSS, run
from rank_engines import BRANCHES, KEPT, assert_trains_as_one, share_of
from rank_processes import run_ranks
from tiny_families import RECURRENT, save_hybrid
from verl.utils.metric import Metric

from tree_rl.verl_plugin.options import TreeConfig

DEALT = [("unequal_trees", 30), ("unequal_trees", 5), ("one_rank_untrained", 30), ("one_rank_empty", 5)]
LAYERS_APART = {"transformer_layer_cls_to_wrap": ["Qwen3Attention", "Qwen3MLP"]}
SHARDINGS: dict[str, dict[str, Any]] = {
    "forward_prefetch and wrap_policy": {
        "engine": {"forward_prefetch": True, "wrap_policy": LAYERS_APART},
        "model": {"enable_gradient_checkpointing": True},
    },
    "fsdp_size": {"engine": {"fsdp_size": 1}},
    "reshard_after_forward and use_no_sync_for_gradient_accumulation": {"engine": KEPT},
}
"""verl's options, by which two ranks run unequal trees."""


def run_share(engine: Any, deal: str, rank: int) -> dict[str, Any]:
    got = run(engine, share_of(deal, rank), LOSS)
    # verl joins Metric objects value by value, so ranks need equally many; plain lists are chained.
    keys = {key: len(m.values) if isinstance(m, Metric) else None for key, m in got["metrics"].items()}
    return {"gradients": got["gradients"], "loss": sum(got["loss"]), "metrics": keys}


def rank_main(rank: int, model: Path) -> dict[str, Any]:
    """Run this rank's share of every deal; imports cost more than the runs."""
    engine, found = build_engine(model, tree=TreeConfig(mode="tree")), dict[str, Any]()
    for deal, budget in DEALT:
        engine.step.options = TreeConfig(mode="tree", max_tokens=budget)
        found[f"{deal}_{budget}"] = run_share(engine, deal, rank)
    for name, options in SHARDINGS.items():
        sharded = build_engine(model, tree=TreeConfig(mode="tree", max_tokens=30), **options)
        found[name] = run_share(sharded, "unequal_trees", rank)
    data = share_of("one_rank_empty", rank)
    data["input_ids"].values().fill_(10_000)
    with pytest.raises((RuntimeError, ValueError)) as refused:
        run(engine, data, LOSS)
    return found | {"refused": str(refused.value)}


def casting_main(rank: int, model: Path) -> dict[str, Any]:
    engine = build_engine(model, tree=TreeConfig(mode="tree", max_tokens=30))
    return {"one_rank_empty": run_share(engine, "one_rank_empty", rank)}


def failing_main(rank: int, model: Path) -> None:
    """The last rank's loss fails in the middle of the step, while the others wait in a collective."""
    engine = build_engine(model, tree=TreeConfig(mode="tree", max_tokens=7))

    def failing(**kwargs: Any) -> Any:
        raise ArithmeticError("the reward model returned nonsense")

    run(engine, ppo_batch(BRANCHES, calculate_entropy=True), failing if rank == 1 else LOSS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its head is an FSDP2 module of its own, which answers with log-probs."""
    return save_model(tmp_path_factory.mktemp("model"), tiny_qwen3(tie_word_embeddings=False))


@pytest.fixture(scope="module")
def two_ranks(model: Path) -> list[dict[str, Any]]:
    return run_ranks(rank_main, 2, model)


@pytest.mark.parametrize(("deal", "budget"), DEALT)
def test_two_ranks_train_as_one(model: Path, two_ranks: list[dict[str, Any]], deal: str, budget: int) -> None:
    assert_trains_as_one(model, two_ranks, deal, f"{deal}_{budget}")


def test_a_model_that_casts_its_logits_stays_in_step_with_a_rank_without_rows(tmp_path: Path) -> None:
    # In float32 the cast returns the head's own output, on which FSDP2's hooks of model and head fire in another order.
    model = save_hybrid(tmp_path, RECURRENT["nemotron_h"])
    assert_trains_as_one(model, run_ranks(casting_main, 2, model, seconds=30), "one_rank_empty", "one_rank_empty")


@pytest.mark.parametrize("options", SHARDINGS)
def test_options_of_sharding_train_as_one_rank(model: Path, two_ranks: list[dict[str, Any]], options: str) -> None:
    assert_trains_as_one(model, two_ranks, "unequal_trees", options)


def test_a_rank_that_refuses_its_rows_takes_the_job_down_with_its_own_error(two_ranks: list[dict[str, Any]]) -> None:
    assert "token id 10000 is outside the vocabulary" in two_ranks[0]["refused"]
    assert "another data-parallel rank refused its rows" in two_ranks[1]["refused"]


def test_a_rank_that_fails_within_a_step_takes_the_job_down_with_its_own_error(model: Path) -> None:
    # gloo alone would give up after 30 minutes, beyond the time limit of a test.
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="the reward model returned nonsense"):
        run_ranks(failing_main, 2, model)
