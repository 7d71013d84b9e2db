"""verl's router replay on trees: an update repeats recorded experts as stock verl's engine does on rows alone whose
routers are told what to choose; R2 records what each row's routers chose. The auxiliary loss counts all rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import FLAGS, LORA, build_engine, ppo_batch, save_model, tiny_qwen3
from equivalence import LOSS, alone, assert_equal_gradients, infer, run
from hostile_rows import SHAPES
from routed_rows import assert_same, batch_with, move_weights, recorded_routes, replaying, stock_run
from tiny_families import COEF, CONFIGS, EXPERTS, auxiliary_gradients
from verl_losses import actor_loss

from tree_rl.tree import RowError
from tree_rl.verl_plugin.options import TreeConfig
from tree_rl.verl_plugin.refusals.refusal import UnsupportedFeatureError


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), CONFIGS["qwen3_moe"])


@pytest.mark.parametrize("family, name, budget", (("qwen3_moe", "strict_prefix", 9), ("deepseek_v3", "branches", 1000)))
def test_rollout_routes_are_repeated_as_by_rows_alone(tmp_path: Path, family: str, name: str, budget: int) -> None:
    path = save_model(tmp_path, CONFIGS[family])
    stock = build_engine(path, tree=None)
    tree = build_engine(path, tree=TreeConfig(max_tokens=budget), **replaying("R3"))
    rows, routes = SHAPES[name], recorded_routes(SHAPES[name])
    expected = stock_run(stock, rows, routes)
    assert_same(expected, run(tree, batch_with(routes, rows), LOSS), rows)
    assert abs(sum(alone(stock, rows)["loss"]) - sum(expected["loss"])) > 1e-4


def test_old_log_probs_record_what_the_update_repeats(path: Path) -> None:
    rows = [*SHAPES["comb"], *SHAPES["identical"], *SHAPES["strict_prefix"]]
    stock = build_engine(path, tree=None)
    tree = build_engine(path, tree=TreeConfig(max_tokens=9), **replaying("R2"))
    recorded = infer(tree, ppo_batch(rows, **FLAGS))["routed_experts"]
    assert recorded.dtype == torch.int16
    routes = [row.numpy() for row in recorded.unbind()]
    # Told what was recorded, stock routers choose what they choose untold, until the weights move.
    assert_same(alone(stock, rows), stock_run(stock, rows, routes), rows)
    for engine in (stock, tree):
        move_weights(engine)
    untold, told = alone(stock, rows), stock_run(stock, rows, routes)
    assert abs(sum(untold["loss"]) - sum(told["loss"])) > 1e-4
    got = run(tree, batch_with(routes, rows), LOSS)
    assert_same(told, got, rows)
    assert "routed_experts" not in got["model_output"]


def test_the_reference_inside_an_actor_routes_itself(path: Path) -> None:
    lora = LORA | {"target_modules": ["q_proj", "v_proj"]}
    tree = build_engine(path, tree=TreeConfig(), model=lora, **replaying("R2"))
    rows = SHAPES["branches"]
    actor = infer(tree, ppo_batch(rows, **FLAGS))
    with tree.disable_adapter():
        reference = infer(tree, batch_with(recorded_routes(rows), rows))
    assert "routed_experts" in actor and "routed_experts" not in reference


def test_a_call_may_be_told_not_to_repeat(path: Path) -> None:
    rows, routes = SHAPES["branches"], recorded_routes(SHAPES["branches"])
    tree = build_engine(path, tree=TreeConfig(), **replaying("R3"))
    plain = infer(build_engine(path, tree=TreeConfig(mode="tree")), ppo_batch(rows, **FLAGS))
    told = infer(tree, batch_with(routes, rows, enable_routing_replay=False))
    repeated = infer(tree, batch_with(routes, rows, enable_routing_replay=True))
    values = [one["log_probs"].values() for one in (plain, told, repeated)]
    assert torch.equal(values[0], values[1]) and not torch.allclose(values[0], values[2], atol=1e-3)


@pytest.mark.parametrize(
    "mode, change, message",
    (
        ("R3", lambda routes: [routes[0][:-1], *routes[1:]], r"row 0 .*routed_experts of \d+ tokens for a row of \d+"),
        ("R3", lambda routes: [*routes[:-1], routes[-1] + EXPERTS], r"row 3 .*names an expert outside \[0, 6\)"),
        ("R2", None, r"router_replay\.mode=R2: the rows carry no routed_experts.*bypass_mode=False"),
        ("R3", None, r"router_replay\.mode=R3: the rows carry no routed_experts.*enable_rollout_routing_replay=True"),
        (None, lambda routes: routes, r"router_replay\.mode=R3 .*enable_rollout_routing_replay=False"),
    ),
    ids=("too few", "another expert", "none recorded", "none of a rollout", "no mode that repeats them"),
)
def test_routes_that_do_not_fit_are_refused(path: Path, mode: str | None, change: Any, message: str) -> None:
    rows = SHAPES["branches"]
    data = ppo_batch(rows, **FLAGS) if change is None else batch_with(change(recorded_routes(rows)), rows)
    engine = build_engine(path, tree=TreeConfig(self_check=False), **({} if mode is None else replaying(mode)))
    with pytest.raises(UnsupportedFeatureError if mode is None else RowError, match=message):
        run(engine, data, LOSS)


@pytest.mark.parametrize(
    "tree, engine, message",
    (
        (TreeConfig(mode="flat"), replaying("R3"), r"router_replay\.mode=R3 with tree\.mode=flat"),
        (TreeConfig(), replaying("R2", forward_only=True), r"router_replay\.mode=R2 on a reference policy"),
        (TreeConfig(), {"engine": {"router_replay": {"mode": "R4"}}}, r"router_replay\.mode=R4: expected one of"),
        (TreeConfig(), {**replaying("R2"), "value": True}, r"router_replay\.mode=R2 on a critic"),
    ),
)
def test_what_cannot_repeat_routes_is_named(path: Path, tree: TreeConfig, engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_engine(path, tree=tree, **engine)


def test_critics_and_references_pass_over_routes_of_the_actor(path: Path, tmp_path: Path) -> None:
    rows, routes = SHAPES["branches"], recorded_routes(SHAPES["branches"])
    critic = build_engine(save_model(tmp_path, tiny_qwen3(), value=True), tree=TreeConfig(), value=True)
    reference = build_engine(path, tree=TreeConfig(), engine={"forward_only": True})
    for engine, key in ((critic, "values"), (reference, "log_probs")):
        with_routes, without = (infer(engine, data) for data in (batch_with(routes, rows), ppo_batch(rows, **FLAGS)))
        assert torch.equal(with_routes[key].values(), without[key].values())


def test_auxiliary_loss_over_all_rows(path: Path) -> None:
    rows = SHAPES["two_groups"]
    stock = alone(build_engine(path, tree=None), rows)
    value, auxiliary = auxiliary_gradients(path, rows)
    options = TreeConfig(max_tokens=5, router_aux_loss_coef=COEF)
    tree = build_engine(path, tree=options, model={"enable_gradient_checkpointing": True})
    got = run(tree, ppo_batch(rows, **FLAGS), LOSS)
    assert sum(got["loss"]) == pytest.approx(sum(stock["loss"]), rel=1e-4, abs=1e-6)
    expected = {key: gradient + COEF * auxiliary[key] for key, gradient in stock["gradients"].items()}
    assert_equal_gradients(expected, got["gradients"])
    metrics = got["metrics"]
    assert metrics["moe/aux_loss"].aggregate() == pytest.approx(value, rel=1e-5)
    assert metrics["moe/counted_anew"].aggregate() == 1
    assert metrics["moe/load_max_over_mean"].aggregate() > 1 > metrics["moe/load_min_over_mean"].aggregate()
    only_counts = build_engine(path, tree=TreeConfig(router_aux_loss_coef=0.0))
    counted = run(only_counts, ppo_batch(rows, **FLAGS), LOSS)["metrics"]
    assert "moe/aux_loss" not in counted and counted["moe/load_max_over_mean"].aggregate() > 1
    # A loss that couples log-probs computes all of them before the first backward.
    coupled = run(tree, ppo_batch(rows, **FLAGS), actor_loss("geo_mean", "token-mean"))
    assert coupled["metrics"]["moe/aux_loss"].aggregate() == pytest.approx(value, rel=1e-5)


def test_load_is_remembered_until_the_weights_move(path: Path) -> None:
    engine = build_engine(path, tree=TreeConfig(max_tokens=20, router_aux_loss_coef=COEF))
    forwards: list[int] = []
    engine.module.register_forward_pre_hook(lambda *_: forwards.append(1))

    def update(name: str) -> tuple[float, int, dict[str, torch.Tensor]]:
        forwards.clear()
        got = run(engine, ppo_batch(SHAPES[name], **FLAGS), LOSS)
        return got["metrics"]["moe/counted_anew"].aggregate(), len(forwards), got["gradients"]

    anew, more_forwards, expected = update("two_groups")
    assert anew == 1
    infer(engine, ppo_batch(SHAPES["two_groups"], **FLAGS))
    anew, fewer_forwards, got = update("two_groups")
    assert anew == 0 and fewer_forwards < more_forwards
    assert_equal_gradients(expected, got)
    assert update("comb")[0] == 1
    infer(engine, ppo_batch(SHAPES["two_groups"], **FLAGS))
    engine.optimizer_step()
    assert update("two_groups")[0] == 1
