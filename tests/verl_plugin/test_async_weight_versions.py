"""Rows of one tree drawn by different weights train exactly as rows alone: every rollout correction of verl, 1e-5.

Weights enter an update through old log-probs, rollout log-probs, correction weights and masks alone, and those stay per
row also on a token that rows share.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import ALONE, FLAGS, build_engine, nested, ppo_batch
from equivalence import assert_equal_runs, infer, run, wanted_positions
from hostile_rows import row, tokens
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.workers.utils.padding import response_from_nested, response_to_nested
from verl_losses import actor_loss

from tree_rl.verl_plugin.options import TreeConfig

TRUNK = tokens(1, 14)
ROWS = [
    row(TRUNK + tokens(80, 9), advantage=1.0),
    row(TRUNK + tokens(81, 5), advantage=-1.5),
    # Context in this row, trained in its siblings; then the same tokens as the first row for a while.
    row(TRUNK + tokens(80, 9)[:4] + tokens(82, 6), mask=[0] * 6 + [1] * 16, advantage=0.7),
    row(TRUNK[:9] + tokens(83, 7), advantage=-0.4),
    row(TRUNK + tokens(80, 9), advantage=-0.8),
]
BUDGETS = {"one forward": None, "partitions": 7}
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
def tree_engines(model_path: Path) -> dict[str, Any]:
    return {
        name: build_engine(model_path, tree=TreeConfig(mode="tree", max_tokens=capacity, self_check=False))
        for name, capacity in BUDGETS.items()
    }


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
def test_update_equals_rows_alone(
    stock: Any, tree_engines: dict[str, Any], current_log_probs: list[torch.Tensor], name: str
) -> None:
    given, loss_mode, agg_mode = CORRECTIONS[name]
    settings = RolloutCorrectionConfig(**{"rollout_is": None, "rollout_is_threshold": 2.0, **given})
    loss = actor_loss(loss_mode, agg_mode, policy={"rollout_correction": settings})
    flags = {} if name in TOGETHER else ALONE
    expected = run(stock, corrected_batch(current_log_probs, settings, **FLAGS, **flags), loss)
    for budget, engine in tree_engines.items():
        got = run(engine, corrected_batch(current_log_probs, settings, **FLAGS), loss)
        assert got["metrics"]["tree/unique_tokens"].aggregate() < sum(len(r.tokens) for r in ROWS)
        assert (got["metrics"]["tree/partitions"].aggregate() > 1) == (budget == "partitions")
        assert_equal_runs(expected, got, wanted_positions(ppo_batch(ROWS)), ("log_probs", "entropy"))
