"""Inside the engine the head answers with edge log-probs, sharded or not; where it cannot, logits train the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import build_engine, ppo_batch, save_model, tiny_qwen3
from equivalence import FLAGS, LOSS, alone, assert_trains_as, run
from hostile_rows import SHAPES

from tree_rl.models.edge_head import EdgeHead
from tree_rl.verl_plugin.options import TreeConfig


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
        engine.step.idle_forward()
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
    assert_trains_as(alone(stock, SHAPES["temperatures_differ"]), tree, SHAPES["temperatures_differ"])


def test_lora_on_the_head_trains_through_logits(tmp_path: Path, answers: list[str]) -> None:
    # Tied, for verl cannot shard an adapter on a head that is an FSDP2 module of its own.
    path = save_model(tmp_path, tiny_qwen3())
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"]}
    engines = []
    for tree in (None, TreeConfig(mode="tree", max_tokens=7)):
        torch.manual_seed(11)
        engines.append(build_engine(path, tree=tree, model=lora))
    got = assert_trains_as(alone(engines[0], SHAPES["comb"]), engines[1], SHAPES["comb"])
    assert any("lm_head" in name for name in got["gradients"])
    assert not answers
