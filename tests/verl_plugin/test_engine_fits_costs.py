"""An engine learns from its updates what its work costs, says how well it predicts, and keeps that in checkpoints."""

import dataclasses
from pathlib import Path

from engine_harness import build_engine, ppo_batch, save_model, tiny_qwen3
from equivalence import LOSS, run
from hostile_rows import shapes

from tree_rl.cost.cost_fit import LEAST_EQUATIONS
from tree_rl.cost.cost_model import CostModel
from tree_rl.verl_plugin.engine.outputs_back import COST
from tree_rl.verl_plugin.options import TreeConfig
from tree_rl.verl_plugin.trainer.step_metrics import fitted_cost

NAMES = [field.name for field in dataclasses.fields(CostModel)]


def test_updates_teach_what_work_costs(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", tiny_qwen3())
    engine = build_engine(path, tree=TreeConfig(mode="tree", max_tokens=20))
    batches = [ppo_batch(rows, calculate_entropy=True) for rows in list(shapes().values())[:4]]
    # An update is counted when the next one is planned.
    results = [run(engine, batches[number % 4], LOSS)["metrics"] for number in range(LEAST_EQUATIONS + 2)]
    for early in results[:LEAST_EQUATIONS]:
        assert not any(name.startswith(COST) for name in early) and "tree/cost_error" not in early
    assert {f"{COST}{name}" for name in NAMES} <= set(results[-1])
    assert results[-1]["tree/cost_error"].aggregate() >= 0
    reported = {f"actor/{name}": value.aggregate() for name, value in results[-1].items() if name.startswith(COST)}
    assert fitted_cost(reported, "actor") == engine.step.learner.calls.fitted
    assert fitted_cost({}, "actor") is None

    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    other = build_engine(path, tree=TreeConfig(mode="tree", max_tokens=20))
    other.load_checkpoint(str(tmp_path / "checkpoint"), del_local_after_load=False)
    assert other.step.learner.calls.fitted == engine.step.learner.calls.fitted is not None
