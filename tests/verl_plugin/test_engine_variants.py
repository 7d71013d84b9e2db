"""What users switch on around the engine changes nothing: checkpointing, LoRA, untied heads, budgets, modes."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import build_engine, ppo_batch, save_model, tiny_qwen3
from equivalence import LOSS, alone, answers_of_heads, assert_trains_as, infer, run, wanted_positions
from hostile_rows import SHAPES

from tree_rl.cost.cost_fit import LEAST_EQUATIONS
from tree_rl.cost.cost_model import CostModel
from tree_rl.verl_plugin.engine.outputs_back import COST
from tree_rl.verl_plugin.options import TreeConfig
from tree_rl.verl_plugin.trainer.step_metrics import fitted_cost


def compare_built(path: Path, name: str, *, tree: TreeConfig | None = None, **build: Any) -> dict[str, Any]:
    """Build both engines with the same settings and compare one update; returns the tree run."""
    stock, engine = (build_engine(path, tree=options, **build) for options in (None, tree or TreeConfig(mode="tree")))
    return assert_trains_as(alone(stock, SHAPES[name]), engine, SHAPES[name])


@pytest.mark.parametrize(("max_tokens", "forwards", "reshard"), ((1000, 1, True), (7, 6, False)))
def test_an_untied_head_answers_every_forward_with_log_probs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_tokens: int, forwards: int, reshard: bool
) -> None:
    answers = answers_of_heads(monkeypatch)
    path = save_model(tmp_path, tiny_qwen3(tie_word_embeddings=False))
    tree = TreeConfig(mode="tree", max_tokens=max_tokens, self_check=False)
    got = compare_built(path, "branches", tree=tree, engine={"reshard_after_forward": reshard})
    assert any(name.endswith("lm_head.weight") for name in got["gradients"])
    assert got["metrics"]["tree/partitions"].aggregate() == forwards and answers == ["EdgeValues"] * forwards


@pytest.mark.parametrize(
    "name, tree, unique, flat",
    (
        ("two_groups", TreeConfig(mode="tree", scope="uid"), 12 + 12 + 4 * 4, 4 * 16),
        ("two_groups", TreeConfig(mode="tree", scope="rank"), 12 + 4 * 4, 4 * 16),
        ("no_common_root", TreeConfig(mode="auto"), 3 * 6, 3 * 6),
    ),
)
def test_scope_and_mode_say_who_shares(model_path: Path, name: str, tree: TreeConfig, unique: int, flat: int) -> None:
    metrics = compare_built(model_path, name, tree=tree)["metrics"]
    assert [metrics[f"tree/{kind}_tokens"].aggregate() for kind in ("unique", "flat")] == [unique, flat]


def test_inference_keeps_the_order_of_the_rows(model_path: Path) -> None:
    rows = [*SHAPES["two_groups"][::-1], *SHAPES["strict_prefix"]]
    wanted = wanted_positions(ppo_batch(rows))
    flags = {"calculate_entropy": True, "calculate_sum_pi_squared": True}
    trees = (None, TreeConfig(mode="tree", max_tokens=17), TreeConfig(mode="auto", max_tokens=40))
    engines = [build_engine(model_path, tree=tree) for tree in trees]
    engines.append(build_engine(model_path, tree=TreeConfig(mode="tree"), engine={"forward_only": True}))
    expected, *outputs = (infer(engine, ppo_batch(rows, **flags)) for engine in engines)
    for output in outputs:
        for key in ("log_probs", "entropy", "sum_pi_squared"):
            found, alone = output[key], expected[key]
            torch.testing.assert_close(found.values()[wanted], alone.values()[wanted], rtol=2e-5, atol=2e-5)
            assert torch.equal(found.offsets(), alone.offsets())


def test_updates_teach_costs_and_checkpoints_of_plain_transformers_keep_them(model_path: Path, tmp_path: Path) -> None:
    tree = TreeConfig(mode="tree", max_tokens=20)
    engine = build_engine(model_path, tree=tree)
    batches = [ppo_batch(rows, calculate_entropy=True) for rows in list(SHAPES.values())[:4]]
    # An update is counted when the next one is planned.
    *early, last = [run(engine, batches[number % 4], LOSS)["metrics"] for number in range(LEAST_EQUATIONS + 2)]
    for metrics in early[:LEAST_EQUATIONS]:
        assert not any(name.startswith(COST) for name in metrics) and "tree/cost_error" not in metrics
    assert {f"{COST}{field.name}" for field in dataclasses.fields(CostModel)} <= set(last)
    assert last["tree/cost_error"].aggregate() >= 0
    reported = {f"actor/{name}": value.aggregate() for name, value in last.items() if name.startswith(COST)}
    assert fitted_cost(reported) == engine.step.learner.calls.fitted and fitted_cost({}) is None
    engine.optimizer_step()
    engine.step.learner.budget.restore({"tokens": 4096, "most_flat_tokens": 2048})
    engine.save_checkpoint(str(tmp_path), global_step=1)
    configs = list(tmp_path.rglob("config.json"))
    assert configs and all("tree_rl" not in config.read_text() for config in configs)
    other = build_engine(model_path, tree=tree)
    other.load_checkpoint(str(tmp_path), del_local_after_load=False)
    saved, loaded = engine.get_per_tensor_param()[0], other.get_per_tensor_param()[0]
    for (name, expected), (_, got) in zip(saved, loaded, strict=True):
        assert torch.equal(got, expected), name
    assert other.step.learner.calls.fitted == engine.step.learner.calls.fitted is not None
    budget = other.step.learner.budget
    assert (budget.tokens, budget.most_flat_tokens) == (4096, 2048)
