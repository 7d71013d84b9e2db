"""verl's on-policy distillation from a teacher's likeliest tokens: trees train as stock verl's engine on rows alone."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import ALONE, VOCAB, Row, build_engine, nested, ppo_batch
from equivalence import answers_of_heads, assert_equal_gradients, run
from hostile_rows import SHAPES, tokens, whole_rows
from tensordict import TensorDict
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.workers.config import DistillationConfig, DistillationLossConfig
from verl_losses import actor_loss

from tree_rl.training.loss.edges import plan_edges
from tree_rl.tree import Forest
from tree_rl.tree.forest import RowError
from tree_rl.verl_plugin.options import TreeConfig

TOP_K = 5
BUDGETS = (None, 16)


def distillation(policy_loss: str = "vanilla", **options: Any) -> Any:
    loss = DistillationLossConfig(loss_mode="forward_kl_topk", topk=TOP_K, **{"use_policy_gradient": False, **options})
    actor = actor_loss(policy_loss, "token-mean").keywords["config"]
    return partial(distillation_ppo_loss, config=actor, distillation_config=DistillationConfig(distillation_loss=loss))


LOSSES = {
    "supervised": distillation(use_task_rewards=False),
    "clamped": distillation(use_task_rewards=False, log_prob_min_clamp=-4.0, loss_max_clamp=1.0),
    "with rewards": distillation(use_task_rewards=True, distillation_loss_coef=0.5),
    "as a reward": distillation(use_task_rewards=False, use_policy_gradient=True),
    "with a loss of sequences": distillation("gspo", use_task_rewards=True),
}


def teacher(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and log-probs of K tokens at every position, which differ from row to row also on a shared prefix."""
    generator = np.random.default_rng(7)
    ids, log_probs = [], []
    for length in lengths:
        logits = generator.normal(0, 2, (length, VOCAB))
        likeliest = np.argsort(-logits)[:, :TOP_K]
        ids.append(torch.from_numpy(likeliest.astype(np.int32)))
        all_log_probs = torch.from_numpy(logits).float().log_softmax(-1)
        log_probs.append(all_log_probs.gather(1, ids[-1].long()))
    return nested(ids), nested(log_probs)


ROWS = [one for one in whole_rows() if any(one.mask)]
"""Hostile groups; stock verl's metrics fail on a row alone in which nothing is trained."""


def distilled_batch(rows: list[Row], **flags: Any) -> TensorDict:
    data = ppo_batch(rows, calculate_entropy=True, distillation_use_topk=True, **flags)
    data["teacher_ids"], data["teacher_logprobs"] = teacher([len(one.tokens) for one in rows])
    return data


@pytest.fixture(scope="module")
def expected(stock: Any) -> dict[str, dict[str, Any]]:
    """Stock verl's updates, row by row; it calls the loss in its forward for what needs logits."""
    return {name: run(stock, distilled_batch(ROWS, **ALONE), loss) for name, loss in LOSSES.items()}


@pytest.mark.parametrize(("name", "budget"), [(name, BUDGETS[at % 2]) for at, name in enumerate(LOSSES)])
def test_trees_distil_as_rows_alone(
    model_path: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str, budget: int | None
) -> None:
    engine = build_engine(model_path, tree=TreeConfig(mode="auto", max_tokens=budget))
    answers = answers_of_heads(monkeypatch)
    got = run(engine, distilled_batch(ROWS), LOSSES[name])
    assert sum(got["loss"]) == pytest.approx(sum(expected[name]["loss"]), rel=1e-5)
    assert_equal_gradients(expected[name]["gradients"], got["gradients"])
    if budget is None:
        # In verl each row's minimum is an entry, here each micro-batch's.
        for metric in ("student_mass_min", "student_mass_max", "teacher_mass_max", "loss_min", "loss_max"):
            ours, theirs = (one["metrics"][f"distillation/{metric}"].aggregate() for one in (got, expected[name]))
            assert ours == pytest.approx(theirs, rel=1e-4)
    else:
        assert got["metrics"]["tree/partitions"].aggregate() > 10
    # Behind the self-check, whose row alone has logits, no forward computed any.
    assert len(answers) > 2 and "Tensor" not in answers[2:]


def test_a_candidate_of_several_rows_is_computed_once() -> None:
    trunk = tokens(1, 8)
    forest = Forest.from_rows([trunk + tokens(2, 3), trunk + tokens(3, 3)])
    wanted = np.tile(np.append(np.ones(10, dtype=bool), False), 2)
    candidates = np.tile(np.arange(4), (22, 1))
    plan = plan_edges(forest, wanted, np.ones(2, dtype=np.float32), candidates_FK=candidates)
    # 13 edges to the rows' tokens start at 12 sources (the branch has two children), with four candidates each.
    assert (len(np.unique(plan.source_E)), len(plan.target_E)) == (12, 13 + 12 * 4)


def test_padding_rows_that_are_alone_change_nothing(model_path: Path) -> None:
    padding = replace(SHAPES["branches"][0], uid="pad", mask=[0] * len(SHAPES["branches"][0].mask))
    engine = build_engine(model_path, tree=TreeConfig(mode="tree", max_tokens=18))
    runs = []
    for rows in (SHAPES["branches"], [*SHAPES["branches"], padding]):
        runs.append(run(engine, distilled_batch(rows), LOSSES["supervised"]))
    assert [one["metrics"]["tree/micro_batches"].aggregate() for one in runs] == [1, 2]
    assert_equal_gradients(runs[0]["gradients"], runs[1]["gradients"])


def test_wrong_columns_of_the_teacher_are_named(model_path: Path) -> None:
    engine = build_engine(model_path, tree=TreeConfig(mode="tree"))
    loss, data = LOSSES["supervised"], distilled_batch(ROWS)
    for wrong, said in (
        ({"teacher_ids": torch.full_like(data["teacher_ids"], VOCAB)}, r"row 0 .*: teacher_ids \[97, .* leave the voc"),
        ({"teacher_ids": teacher([3] * len(data))[0]}, r"row 0 .*: has another number of teacher_ids than tokens"),
        ({}, "expected columns teacher_ids and teacher_logprobs"),
    ):
        with pytest.raises(RowError, match=said):
            run(engine, data.exclude("teacher_ids").update(wrong), loss)
