"""DPO and IPO on trees: gradients of pairs whose rows run alone, whole, in partitions, on two ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import build_engine, ppo_batch, with_whole_masks
from equivalence import assert_equal_gradients, run
from hostile_rows import SHAPES
from rank_processes import run_ranks
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu

from tree_rl.training.loss.preference_loss import preference_losses
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.verl_plugin.engine.pair_loss import PLACE, REFERENCE, PairLoss
from tree_rl.verl_plugin.options import TreeConfig

LOSSES = {
    "dpo": PairLoss(beta=0.3),
    "conservative": PairLoss(beta=0.3, label_smoothing=0.2),
    "ipo": PairLoss(beta=0.3, loss_type="ipo"),
    "reference_free": PairLoss(beta=0.3, reference_free=True),
}
BUDGET = {"dpo": None, "conservative": 16, "ipo": 16, "reference_free": None}
TRAINED = ([replace(one, uid=name) for one in rows if any(one.mask)] for name, rows in SHAPES.items())
PAIRS = [(one, rows[(at + 1) % len(rows)]) for rows in TRAINED for at, one in enumerate(rows)]
"""Every row of each hostile group against the next one; each row has a trained token, as in preference data."""
TOKENS_OF_PAIRS = np.array([[sum(one.mask) for one in pair] for pair in PAIRS])
REFERENCES = np.random.default_rng(0).normal(-4.5, 0.5, TOKENS_OF_PAIRS.shape) * TOKENS_OF_PAIRS
"""float64 [pairs, 2], a log-prob near the model's of each row."""


def pair_batch(picked: list[int]) -> TensorDict:
    """Some pairs, as the collator of the trainer leaves them."""
    pairs = [PAIRS[number] for number in picked]
    data = with_whole_masks(ppo_batch([one for pair in pairs for one in pair]))
    tu.assign_non_tensor(data, global_batch_size=len(PAIRS))
    data[PLACE] = torch.arange(2 * len(pairs))
    data[REFERENCE] = torch.from_numpy(REFERENCES[picked].ravel())
    return data


def alone(path: Path, loss: PairLoss) -> tuple[float, dict[str, float], dict[str, torch.Tensor]]:
    """Loss, metrics and gradients of the formula on rows that run alone through the plain model."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    total, sums = 0.0, dict.fromkeys(("chosen", "rejected", "right"), 0.0)
    for pair, reference in zip(PAIRS, REFERENCES.tolist(), strict=True):
        ratios, compared = [], []
        for one, before in zip(pair, reference, strict=True):
            mask = torch.tensor([0] * one.prompt + one.mask).roll(-1)
            log_prob = (branch_log_probs(model, [one.tokens], temperature=one.temperature) * mask).sum()
            ratios.append(log_prob - (0.0 if loss.reference_free else before))
            compared.append(ratios[-1] / mask.sum() if loss.loss_type == "ipo" else ratios[-1])
        chosen, rejected = ratios
        options = {"beta": loss.beta, "label_smoothing": loss.label_smoothing, "loss_type": loss.loss_type}
        value = preference_losses(*compared, **options)
        (value / len(PAIRS)).backward()
        total += value.item() / len(PAIRS)
        sums["chosen"] += loss.beta * chosen.item() / len(PAIRS)
        sums["rejected"] += loss.beta * rejected.item() / len(PAIRS)
        sums["right"] += float(chosen > rejected) / len(PAIRS)
    return total, sums, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def expected(model_path: Path) -> dict[str, Any]:
    return {name: alone(model_path, loss) for name, loss in LOSSES.items()}


@pytest.mark.parametrize(("name", "budget"), BUDGET.items())
def test_a_tree_is_its_pairs(model_path: Path, expected: dict[str, Any], name: str, budget: int | None) -> None:
    # With `auto` some groups would run without a tree, packed row by row.
    engine = build_engine(model_path, tree=TreeConfig(mode="auto", max_tokens=budget))
    got = run(engine, pair_batch(list(range(len(PAIRS)))), LOSSES[name])
    loss, means, gradients = expected[name]
    assert sum(got["loss"]) == pytest.approx(loss, rel=1e-5)
    assert_equal_gradients(gradients, got["gradients"])
    metrics = {key: value.aggregate() for key, value in got["metrics"].items() if key.startswith("rewards/")}
    assert metrics["rewards/chosen"] == pytest.approx(means["chosen"], rel=1e-4)
    assert metrics["rewards/rejected"] == pytest.approx(means["rejected"], rel=1e-4)
    assert metrics["rewards/margins"] == pytest.approx(means["chosen"] - means["rejected"], rel=1e-3)
    assert metrics["rewards/accuracies"] == pytest.approx(means["right"])
    if budget is not None:
        assert got["metrics"]["tree/partitions"].aggregate() > len(SHAPES)


def rank_main(rank: int, model: Path) -> list[tuple[float, dict[str, torch.Tensor]]]:
    engine, found = build_engine(model, tree=TreeConfig(mode="tree")), []
    for name in ("dpo", "ipo"):
        engine.step.options = TreeConfig(mode="tree", max_tokens=BUDGET[name])
        got = run(engine, pair_batch(list(range(rank, len(PAIRS), 2))), LOSSES[name])
        found.append((sum(got["loss"]), got["gradients"]))
    return found


def test_two_ranks_train_pairs_as_one(model_path: Path, expected: dict[str, Any]) -> None:
    for name, runs in zip(("dpo", "ipo"), zip(*run_ranks(rank_main, 2, model_path), strict=True), strict=True):
        loss, _, gradients = expected[name]
        assert np.mean([value for value, _ in runs]) == pytest.approx(loss, rel=1e-5)
        assert_equal_gradients(gradients, runs[0][1])


def test_half_a_pair_is_refused(model_path: Path) -> None:
    loss = LOSSES["dpo"]
    data = tu.index_select_tensor_dict(pair_batch([0, 1, 2]), [0, 2, 4, 5])
    engine = build_engine(model_path, tree=TreeConfig(mode="tree"))
    with pytest.raises(ValueError, match="received a row without the other one of its pair"):
        run(engine, data, loss)
    with pytest.raises(ValueError, match="received 3 rows"):
        run(engine, tu.index_select_tensor_dict(data, [0, 1, 2]), loss)
