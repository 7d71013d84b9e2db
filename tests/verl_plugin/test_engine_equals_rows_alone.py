"""The tree engine against stock verl's FSDP2 engine running every row alone: every loss and shape, whole and cut."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_harness import ALONE, FLAGS, build_engine, nested, ppo_batch, save_model, tiny_qwen3, with_whole_masks
from equivalence import LOSS, alone, assert_equal_runs, assert_trains_as, everywhere, run, wanted_positions
from hostile_rows import SHAPES
from tensordict import TensorDict
from verl.workers.utils.losses import sft_loss
from verl_losses import AGG_MODES, BATCH_LOSSES, POLICY_LOSSES, actor_loss, critic_loss

from tree_rl.verl_plugin.options import TreeConfig

TREES = {
    "whole": TreeConfig(mode="tree"),
    "cut": TreeConfig(mode="tree", max_tokens=7, self_check=False),
    "token by token": TreeConfig(mode="tree", max_tokens=3, self_check=False),
}
Engines = dict[str, Any]


@pytest.fixture(scope="module")
def engines(model_path: Path, stock: Any) -> Engines:
    return {"stock": stock, **{name: build_engine(model_path, tree=tree) for name, tree in TREES.items()}}


@pytest.fixture(scope="module")
def critics(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    path = save_model(tmp_path_factory.mktemp("critic"), tiny_qwen3(tie_word_embeddings=False), value=True)
    trees = {name: build_engine(path, tree=TREES[name], value=True) for name in ("whole", "cut")}
    return {"stock": build_engine(path, tree=None, value=True), **trees}


@pytest.mark.parametrize("name", SHAPES)
def test_every_hostile_shape(engines: Engines, name: str) -> None:
    expected = alone(engines["stock"], SHAPES[name])
    for how in ("whole", ("cut", "token by token")[list(SHAPES).index(name) % 2]):
        metrics = assert_trains_as(expected, engines[how], SHAPES[name])["metrics"]
        if TREES[how].max_tokens is not None:
            least = metrics["tree/unique_tokens"].aggregate() / TREES[how].max_tokens
            assert metrics["tree/partitions"].aggregate() >= least


COMBINATIONS = sorted(
    {(loss, AGG_MODES[at % 5]) for at, loss in enumerate(POLICY_LOSSES)}
    | {(loss, mode) for mode in AGG_MODES for loss in ("vanilla", "gspo")}
)
"""Every loss with one aggregation, a loss of tokens and one of sequences with all."""


@pytest.mark.parametrize("loss_mode, agg_mode", COMBINATIONS)
def test_every_policy_loss(engines: Engines, loss_mode: str, agg_mode: str) -> None:
    rows, loss = SHAPES["masks_differ_on_shared_prefix"], actor_loss(loss_mode, agg_mode)
    flags = {} if loss_mode in BATCH_LOSSES else ALONE
    expected = run(engines["stock"], ppo_batch(rows, **FLAGS, **flags), loss)
    for how in ("whole", "cut"):
        assert_trains_as(expected, engines[how], rows, loss)


def test_all_partitions_clip_the_tokens_that_clip_cov_draws_once(engines: Engines) -> None:
    draws = {"clip_cov_ratio": 0.3, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}
    rows, loss = SHAPES["branches"], actor_loss("clip_cov", "token-mean", policy=draws)
    expected = run(engines["stock"], ppo_batch(rows, **FLAGS), loss)
    assert_trains_as(expected, engines["cut"], rows, loss)


@pytest.mark.parametrize("max_tokens", (16, 40))
def test_micro_batches_of_any_size(engines: Engines, max_tokens: int) -> None:
    rows, loss = SHAPES["two_groups"], actor_loss("vanilla", "seq-mean-token-mean")
    assert_trains_as(
        alone(engines["stock"], rows, loss), engines["whole"], rows, loss, max_token_len_per_gpu=max_tokens
    )


@pytest.mark.parametrize("name", list(SHAPES)[::2])
def test_value_loss(critics: Engines, name: str) -> None:
    loss, flags, rows = critic_loss(), {"return_model_output": True}, SHAPES[name]
    expected = run(critics["stock"], ppo_batch(rows, **flags, **ALONE), loss)
    for how in ("whole", "cut"):
        got = run(critics[how], ppo_batch(rows, **flags), loss)
        assert_equal_runs(expected, got, everywhere(rows), ("values",))


@pytest.mark.parametrize("name", ("strict_prefix", "prompts_of_different_length"))
def test_sft_loss(engines: Engines, name: str) -> None:
    def batch(**flags: Any) -> TensorDict:
        return with_whole_masks(ppo_batch(SHAPES[name], return_model_output=True, **flags))

    loss = partial(sft_loss, config=None)
    expected = run(engines["stock"], batch(**ALONE), loss)
    assert_equal_runs(expected, run(engines["whole"], batch(), loss), wanted_positions(batch()), ("log_probs",))


def test_positions_that_begin_elsewhere_are_rows_alone(engines: Engines) -> None:
    def shifted(**flags: Any) -> TensorDict:
        data = ppo_batch(SHAPES["branches"], **FLAGS, **flags)
        data["position_ids"] = nested([row + 5 * index for index, row in enumerate(data["position_ids"].unbind())])
        return data

    stock, tree = run(engines["stock"], shifted(**ALONE), LOSS), run(engines["whole"], shifted(), LOSS)
    assert_equal_runs(stock, tree, wanted_positions(shifted()), ("log_probs", "entropy"))
