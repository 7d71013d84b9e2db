"""The tree engine against stock verl's FSDP2 engine running every row alone: every loss and shape, whole and cut, and
every rollout correction where other weights drew the rows of a tree."""

from functools import partial
from pathlib import Path
from typing import Any

import compare_checkouts
import pytest
import torch
from engine_harness import ALONE, FLAGS, build_engine, nested, ppo_batch, save_model, tiny_qwen3, with_whole_masks
from equivalence import LOSS, alone, assert_equal_runs, assert_trains_as, everywhere, infer, run, wanted_positions
from hostile_rows import SHAPES, row, tokens
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.workers.utils.losses import sft_loss
from verl.workers.utils.padding import response_from_nested, response_to_nested
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


@pytest.mark.parametrize("budget", (16, 40))
def test_micro_batches_of_any_size(engines: Engines, budget: int) -> None:
    rows, loss = SHAPES["two_groups"], actor_loss("vanilla", "seq-mean-token-mean")
    assert_trains_as(alone(engines["stock"], rows, loss), engines["whole"], rows, loss, max_token_len_per_gpu=budget)


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


TRUNK = tokens(1, 14)
ROWS = [
    row(TRUNK + tokens(80, 9), advantage=1.0),
    row(TRUNK + tokens(81, 5), advantage=-1.5),
    # Context in this row, trained in its siblings; then the same tokens as the first row for a while.
    row(TRUNK + tokens(80, 9)[:4] + tokens(82, 6), mask=[0] * 6 + [1] * 16, advantage=0.7),
    row(TRUNK[:9] + tokens(83, 7), advantage=-0.4),
    row(TRUNK + tokens(80, 9), advantage=-0.8),
]
TOKENS = "token-mean"
REJECT_ROWS = {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.55}
REJECT_TOKENS = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.6"}
BOTH = {"rollout_is": "token", "rollout_rs": "token_k3,seq_max_k2", "rollout_rs_threshold": "0.4,0.9"}
OF_ROWS = {"rollout_is": "sequence", "rollout_is_threshold": 50.0}
BYPASS = {"bypass_mode": True, "loss_type": "reinforce"}
NORMALISED = {"rollout_is": "sequence", "rollout_is_batch_normalize": True}
CORRECTIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    # name: (settings of `algorithm.rollout_correction`, loss, its aggregation)
    "token IS that drops tokens": ({"rollout_is": "token", "rollout_is_threshold": "0.6_1.6"}, "vanilla", TOKENS),
    "normalised sequence IS": (NORMALISED, "vanilla", "seq-mean-token-mean"),
    "sequence rejection, seq-mean": (REJECT_ROWS, "vanilla", "seq-mean-token-sum"),
    "IS and rejection": (BOTH, "vanilla", TOKENS),
    "token IS, gspo": ({"rollout_is": "token"}, "gspo", "seq-mean-token-mean"),
    "token IS, geo_mean": ({"rollout_is": "token"}, "geo_mean", TOKENS),
    "bypass, clip and rejection": ({"bypass_mode": True, **REJECT_TOKENS}, "bypass_mode", TOKENS),
    "bypass, reinforce, normalised IS": (BYPASS | OF_ROWS | NORMALISED, "bypass_mode", TOKENS),
}
TOGETHER = ("token IS, geo_mean", "bypass, reinforce, normalised IS")
"""The loss itself normalises over the rows of a micro-batch, so all rows go through one."""


@pytest.fixture(scope="module")
def current_log_probs(stock: Any) -> list[torch.Tensor]:
    """The trainer's log-probs of every response token, by stock verl."""
    data = ppo_batch(ROWS)
    return list(response_from_nested(infer(stock, data)["log_probs"], data["response_mask"]).unbind())


def corrected_batch(current: list[torch.Tensor], settings: RolloutCorrectionConfig, **flags: Any) -> TensorDict:
    """The rows as verl's trainer hands them to `update_actor`: its own rollout correction, then columns per row."""
    data, generator = ppo_batch(ROWS, **flags), torch.Generator().manual_seed(5)

    def of_other_weights(drift: float) -> torch.Tensor:
        """Log-probs that differ from row to row, also on a token that rows share."""
        return nested([values + drift * torch.randn(values.shape, generator=generator) for values in current])

    drawn, mask = of_other_weights(0.5), data["response_mask"]
    data["old_log_probs"] = drawn if settings.bypass_mode else of_other_weights(0.15)
    if settings.bypass_mode:
        return data
    columns = {"old_log_probs": data["old_log_probs"], "rollout_log_probs": drawn, "response_mask": mask}
    padded = DataProto(batch=TensorDict({k: v.to_padded_tensor(0) for k, v in columns.items()}, batch_size=len(ROWS)))
    padded, _ = compute_rollout_correction_and_add_to_batch(padded, settings)
    for name in ("rollout_is_weights", "response_mask"):
        if name in padded.batch:
            data[name] = response_to_nested(padded.batch[name], mask)
    return data


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_rollout_correction(engines: Engines, current_log_probs: list[torch.Tensor], name: str) -> None:
    """Weights enter an update through old log-probs, rollout log-probs, correction weights and masks alone, and those
    stay per row also on a token that rows share."""
    given, loss_mode, agg_mode = CORRECTIONS[name]
    settings = RolloutCorrectionConfig(**{"rollout_is": None, "rollout_is_threshold": 2.0, **given})
    loss = actor_loss(loss_mode, agg_mode, policy={"rollout_correction": settings})
    flags = {} if name in TOGETHER else ALONE
    expected = run(engines["stock"], corrected_batch(current_log_probs, settings, **FLAGS, **flags), loss)
    for how in ("whole", "cut"):
        got = run(engines[how], corrected_batch(current_log_probs, settings, **FLAGS), loss)
        assert got["metrics"]["tree/unique_tokens"].aggregate() < sum(len(r.tokens) for r in ROWS)
        assert (got["metrics"]["tree/partitions"].aggregate() > 1) == (how == "cut")
        assert_equal_runs(expected, got, wanted_positions(ppo_batch(ROWS)), ("log_probs", "entropy"))


def test_the_command_that_compares_two_checkouts_has_cases(tmp_path: Path) -> None:
    name, found = next(compare_checkouts.cases(tmp_path))
    assert name == "branches, max_tokens=None, verl, vanilla"
    assert {"loss", "log_probs", "entropy"} < found.keys()
