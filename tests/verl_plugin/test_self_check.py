"""The first-step self-check finds a model whose tree forward is wrong, and stays quiet for one that is right."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine_harness import build_engine, ppo_batch, save_model, tiny_qwen3
from equivalence import LOSS, infer, run
from hostile_rows import SHAPES

from tree_rl.training.self_check import TreeMismatchError
from tree_rl.verl_plugin.options import TreeConfig


@pytest.mark.parametrize("max_tokens, checked", ((100, True), (20, True), (5, False)))
def test_the_check_keeps_to_the_budget(model_path: Path, max_tokens: int, checked: bool) -> None:
    engine = build_engine(model_path, tree=TreeConfig(mode="tree", max_tokens=max_tokens))
    with patch.object(engine, "stock_step", wraps=engine.stock_step) as alone:
        run(engine, ppo_batch(SHAPES["branches"], calculate_entropy=True), LOSS)
    lengths = [call.args[0]["input_ids"].values().numel() for call in alone.call_args_list]
    assert bool(lengths) == checked and sum(lengths) <= max_tokens


def leaky_engine(path: Path, *, only_in_training: bool = False, **build: Any) -> Any:
    """A layer mixes in its left neighbour in DFS order, as any recurrent layer does that ignores the tree."""
    engine = build_engine(path, **{"tree": TreeConfig(mode="tree"), **build})
    layer = engine.module.model.layers[0].mlp
    forward = layer.forward

    def mixing(hidden: torch.Tensor) -> torch.Tensor:
        out = forward(hidden)
        leaks = layer.training or not only_in_training
        return out + 0.5 * torch.cat([out[:, :1] * 0, out[:, :-1]], dim=1) if leaks else out

    layer.forward = mixing
    return engine


def test_it_can_be_switched_off(model_path: Path) -> None:
    engine = leaky_engine(model_path, tree=TreeConfig(mode="tree", self_check=False))
    run(engine, ppo_batch(SHAPES["branches"], calculate_entropy=True), LOSS)


@pytest.mark.parametrize(
    "name, tree",
    (
        *(("no_common_root", TreeConfig(mode="auto")), ("strict_prefix", TreeConfig(mode="auto"))),
        ("no_common_root", TreeConfig(mode="tree", max_tokens=5, scope="uid")),
        *((name, TreeConfig(mode="tree")) for name in ("identical", "one_row_untrained", "single_response_token")),
        ("branches", TreeConfig(mode="tree", self_check=True)),
    ),
)
def test_a_model_that_mixes_siblings_is_stopped_on_any_rows(model_path: Path, name: str, tree: TreeConfig) -> None:
    """Rows that share nothing stand beside a made-up sibling."""
    with pytest.raises(TreeMismatchError, match="self-check: log_probs"):
        run(leaky_engine(model_path, tree=tree), ppo_batch(SHAPES[name], calculate_entropy=True), LOSS)


def test_an_inference_first_is_checked_as_training_computes(model_path: Path) -> None:
    engine = leaky_engine(model_path, only_in_training=True)
    with pytest.raises(TreeMismatchError, match="self-check: log_probs"):
        infer(engine, ppo_batch(SHAPES["branches"]))
    assert not any(module.training for module in engine.module.modules())


def test_a_critic_whose_rows_share_nothing_is_checked(tmp_path: Path) -> None:
    path = save_model(tmp_path, tiny_qwen3(tie_word_embeddings=False), value=True)
    engine = leaky_engine(path, tree=TreeConfig(mode="tree", max_tokens=5), value=True)
    with pytest.raises(TreeMismatchError, match="self-check: values"):
        infer(engine, ppo_batch(SHAPES["no_common_root"]))
