"""The tree engine against stock verl's own FSDP2 engine running every row alone: one claim, every loss, every shape."""

from functools import partial
from typing import Any

import pytest
import torch
from engine_harness import build_engine, nested, ppo_batch, save_model, tiny_qwen3
from equivalence import actor_loss, assert_equal_runs, run, wanted_positions
from hostile_rows import shapes
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import CriticConfig
from verl.workers.utils.losses import sft_loss, value_loss

from tree_rl.verl_plugin.options import TreeConfig

SHAPES = shapes()
AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
# Losses that normalise by the rows of a micro-batch have no row-alone value: held against one flat micro-batch.
BATCH_LOSSES = ("geo_mean", "kl_cov", "clip_cov")
ROW_LOSSES = tuple(sorted(set(POLICY_LOSS_REGISTRY) - set(BATCH_LOSSES) - {"bypass_mode"}))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """(stock, tree) on the same weights."""
    path = save_model(tmp_path_factory.mktemp("model"), tiny_qwen3())
    return build_engine(path, tree=None), build_engine(path, tree=TreeConfig(mode="tree"))


@pytest.fixture(scope="module")
def critics(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """(stock, tree) critics on the same weights."""
    path = save_model(tmp_path_factory.mktemp("critic"), tiny_qwen3(tie_word_embeddings=False), value=True)
    return build_engine(path, tree=None, value=True), build_engine(path, tree=TreeConfig(mode="tree"), value=True)


def compare(engines: tuple[Any, Any], name: str, loss: Any, *, alone: bool = True, **flags: Any) -> None:
    stock_engine, tree_engine = engines
    alone_flags = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1} if alone else {}
    shared = {"calculate_entropy": True, "return_model_output": True, **flags}
    stock = run(stock_engine, ppo_batch(SHAPES[name], **shared, **alone_flags), loss)
    tree = run(tree_engine, ppo_batch(SHAPES[name], **shared), loss)
    assert_equal_runs(stock, tree, wanted_positions(ppo_batch(SHAPES[name])), ("log_probs", "entropy"))


@pytest.mark.parametrize("name", SHAPES)
def test_vanilla_ppo_on_every_hostile_shape(engines: tuple[Any, Any], name: str) -> None:
    compare(engines, name, actor_loss("vanilla", "token-mean"))


@pytest.mark.parametrize("agg_mode", AGG_MODES)
@pytest.mark.parametrize("loss_mode", ROW_LOSSES)
def test_every_policy_loss_and_aggregation(engines: tuple[Any, Any], loss_mode: str, agg_mode: str) -> None:
    compare(engines, "masks_differ_on_shared_prefix", actor_loss(loss_mode, agg_mode))


@pytest.mark.parametrize("agg_mode", AGG_MODES)
@pytest.mark.parametrize("loss_mode", BATCH_LOSSES)
def test_losses_that_look_at_the_whole_micro_batch(engines: tuple[Any, Any], loss_mode: str, agg_mode: str) -> None:
    compare(engines, "branches", actor_loss(loss_mode, agg_mode), alone=False)


@pytest.mark.parametrize("max_tokens", (1, 20, 40))
def test_micro_batches_of_any_size(engines: tuple[Any, Any], max_tokens: int) -> None:
    compare(
        engines, "two_groups", actor_loss("vanilla", "seq-mean-token-mean"), max_token_len_per_gpu=max(max_tokens, 16)
    )


@pytest.mark.parametrize("name", SHAPES)
def test_value_loss(critics: tuple[Any, Any], name: str) -> None:
    config = CriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, loss_agg_mode="token-mean")
    loss = partial(value_loss, config=config)
    flags = {"return_model_output": True}
    stock = run(critics[0], ppo_batch(SHAPES[name], use_dynamic_bsz=False, micro_batch_size_per_gpu=1, **flags), loss)
    tree = run(critics[1], ppo_batch(SHAPES[name], **flags), loss)
    everywhere = torch.ones(sum(len(row.tokens) for row in SHAPES[name]), dtype=torch.bool)
    assert_equal_runs(stock, tree, everywhere, ("values",))


@pytest.mark.parametrize("name", SHAPES)
def test_sft_loss(engines: tuple[Any, Any], name: str) -> None:
    def batch(**flags: Any) -> TensorDict:
        data = ppo_batch(SHAPES[name], return_model_output=True, **flags)
        rows = zip(data["input_ids"].unbind(), data["response_mask"].unbind(), strict=True)
        full = [torch.cat([mask.new_zeros(len(ids) - len(mask)), mask]) for ids, mask in rows]
        data["loss_mask"] = torch.nested.as_nested_tensor(full, layout=torch.jagged)
        return data

    loss = partial(sft_loss, config=None)
    stock = run(engines[0], batch(use_dynamic_bsz=False, micro_batch_size_per_gpu=1), loss)
    tree = run(engines[1], batch(), loss)
    assert_equal_runs(stock, tree, wanted_positions(batch()), ("log_probs",))


def test_positions_that_begin_elsewhere_are_rows_alone(engines: tuple[Any, Any]) -> None:
    stock_engine, tree_engine = engines
    shared = {"calculate_entropy": True, "return_model_output": True}
    alone = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}

    def shifted(**flags: Any) -> TensorDict:
        data = ppo_batch(SHAPES["branches"], **shared, **flags)
        data["position_ids"] = nested([row + 5 * index for index, row in enumerate(data["position_ids"].unbind())])
        return data

    loss = actor_loss("vanilla", "token-mean")
    stock, tree = run(stock_engine, shifted(**alone), loss), run(tree_engine, shifted(), loss)
    assert_equal_runs(stock, tree, wanted_positions(shifted()), ("log_probs", "entropy"))
