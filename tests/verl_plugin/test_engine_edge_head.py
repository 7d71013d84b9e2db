"""Inside the engine the head answers with edge log-probs, sharded or not; where it cannot, logits train the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import build_engine, ppo_batch, save_model, tiny_qwen3
from equivalence import actor_loss, assert_equal_runs, run, wanted_positions
from hostile_rows import shapes
from test_engine_ranks import assert_trains_as_one, join, share_of, spawn, update

from tree_rl.models.edge_head import EdgeHead
from tree_rl.verl_plugin.options import TreeConfig

SHAPES = shapes()
FLAGS = {"calculate_entropy": True, "return_model_output": True}
LOSS = actor_loss("vanilla", "token-mean")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The type of what heads return, call by call."""
    seen: list[str] = []
    forward = EdgeHead.forward

    def watching(head: EdgeHead, hidden: torch.Tensor) -> Any:
        answer = forward(head, hidden)
        seen.append(type(answer).__name__)
        return answer

    monkeypatch.setattr(EdgeHead, "forward", watching)
    yield seen


@pytest.fixture(scope="module")
def untied_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is an FSDP2 module of its own."""
    return save_model(tmp_path_factory.mktemp("untied"), tiny_qwen3(tie_word_embeddings=False))


@pytest.mark.parametrize(("max_tokens", "forwards"), ((1000, 1), (7, 6)))
def test_every_forward_of_a_tree_is_answered_by_the_head(
    untied_path: Path, answers: list[str], max_tokens: int, forwards: int
) -> None:
    engine = build_engine(untied_path, tree=TreeConfig(mode="tree", max_tokens=max_tokens, self_check=False))
    got = run(engine, ppo_batch(SHAPES["branches"], **FLAGS), LOSS)
    assert got["metrics"]["tree/partitions"].aggregate() == forwards
    assert answers == ["EdgeValues"] * forwards
    with torch.no_grad():
        engine.step.runner.idle_forward()
    assert answers[forwards:] == ["Tensor"]


def test_a_critic_has_no_such_head(tmp_path: Path) -> None:
    path = save_model(tmp_path, tiny_qwen3(tie_word_embeddings=False), value=True)
    engine = build_engine(path, tree=TreeConfig(mode="tree"), value=True)
    assert not any(isinstance(module, EdgeHead) for module in engine.module.modules())


@pytest.mark.parametrize("max_tokens", (1000, 7))
@pytest.mark.parametrize("reshard", (True, False))
def test_an_untied_head(untied_path: Path, reshard: bool, max_tokens: int) -> None:
    build = {"engine": {"reshard_after_forward": reshard}}
    stock = build_engine(untied_path, tree=None, **build)
    tree = build_engine(untied_path, tree=TreeConfig(mode="tree", max_tokens=max_tokens), **build)
    alone = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
    expected = run(stock, ppo_batch(SHAPES["temperatures_differ"], **FLAGS, **alone), LOSS)
    got = run(tree, ppo_batch(SHAPES["temperatures_differ"], **FLAGS), LOSS)
    wanted = wanted_positions(ppo_batch(SHAPES["temperatures_differ"]))
    assert_equal_runs(expected, got, wanted, ("log_probs", "entropy"))


def test_lora_on_the_head_trains_through_logits(tmp_path: Path, answers: list[str]) -> None:
    # Tied, for verl cannot shard an adapter on a head that is an FSDP2 module of its own.
    path = save_model(tmp_path, tiny_qwen3())
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"]}
    engines = []
    for tree in (None, TreeConfig(mode="tree", max_tokens=7)):
        torch.manual_seed(11)
        engines.append(build_engine(path, tree=tree, model=lora))
    alone = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
    expected = run(engines[0], ppo_batch(SHAPES["comb"], **FLAGS, **alone), LOSS)
    got = run(engines[1], ppo_batch(SHAPES["comb"], **FLAGS), LOSS)
    assert_equal_runs(expected, got, wanted_positions(ppo_batch(SHAPES["comb"])), ("log_probs", "entropy"))
    assert any("lm_head" in name for name in got["gradients"])
    assert not answers


DEALS = ("unequal_trees", "one_rank_empty")
BUDGETS = (30, 5)


def rank_main(rank: int, world: int, model: str, out: str, port: int) -> None:
    """Two deals, whole and in partitions, with the head gathered anew for the backward and not."""
    join(rank, world, port)
    for reshard in (True, False):
        engine = build_engine(Path(model), tree=TreeConfig(mode="tree"), engine={"reshard_after_forward": reshard})
        assert any(isinstance(module, EdgeHead) for module in engine.module.modules())
        for deal in DEALS:
            for budget in BUDGETS:
                engine.step.options = TreeConfig(mode="tree", max_tokens=budget)
                got = update(engine, share_of(deal, rank), LOSS)
                place = Path(out) / ("reshard" if reshard else "keep")
                place.mkdir(exist_ok=True)
                result = {"gradients": got["gradients"], "loss": sum(got["output"]["loss"])}
                torch.save(result, place / f"{deal}_{budget}_{rank}.pt")
                (place / f"{deal}_{budget}_{rank}.json").write_text("{}")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    save_model(out / "model", tiny_qwen3(tie_word_embeddings=False))
    spawn(rank_main, 2, out)
    for place in ("reshard", "keep"):
        (out / place / "model").symlink_to(out / "model")
    return out


@pytest.mark.parametrize("place", ("reshard", "keep"))
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("deal", DEALS)
def test_two_ranks_with_an_untied_head_train_as_one(two_ranks: Path, deal: str, budget: int, place: str) -> None:
    assert_trains_as_one(two_ranks / place, deal, budget)
