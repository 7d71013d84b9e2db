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
        engine.step.runner.idle_forward()
    assert answers[forwards:] == ["Tensor"]


@pytest.mark.parametrize("max_tokens", (1000, 7))
@pytest.mark.parametrize("reshard", (True, False))
def test_an_untied_head(untied_path: Path, reshard: bool, max_tokens: int) -> None:
    build = {"engine": {"reshard_after_forward": reshard}}
    stock = build_engine(untied_path, tree=None, **build)
    tree = build_engine(untied_path, tree=TreeConfig(mode="tree", max_tokens=max_tokens), **build)
    assert_trains_as(alone(stock, SHAPES["temperatures_differ"]), tree, SHAPES["temperatures_differ"])
