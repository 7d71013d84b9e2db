"""Trees beyond the budget, cut into partitions of any size, train exactly as stock verl does on rows alone."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import build_engine, ppo_batch, save_model, tiny_qwen3
from equivalence import actor_loss, assert_equal_runs, run, wanted_positions
from hostile_rows import shapes
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import CriticConfig
from verl.workers.utils.losses import value_loss

from tree_rl.verl_plugin.engine.verl_loss import SEPARABLE_POLICY_LOSSES, is_token_separable
from tree_rl.verl_plugin.options import TreeConfig

SHAPES = shapes()
# geo_mean, kl_cov and clip_cov look at all rows of a micro-batch: held against one flat micro-batch, as elsewhere.
BATCH_LOSSES = frozenset({"geo_mean", "kl_cov", "clip_cov"})
LOSSES = sorted(set(POLICY_LOSS_REGISTRY) - {"bypass_mode"})
FLAGS = {"calculate_entropy": True, "return_model_output": True}
ALONE = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tiny_qwen3())


@pytest.fixture(scope="module")
def stock(model_path: Path) -> Any:
    return build_engine(model_path, tree=None)


@pytest.fixture(scope="module")
def tree_engines(model_path: Path) -> dict[int, Any]:
    """One tree engine per budget."""
    return {
        capacity: build_engine(model_path, tree=TreeConfig(mode="tree", max_tokens=capacity, self_check=False))
        for capacity in (3, 7, 20, 64)
    }


def compare(
    stock: Any, tree: Any, name: str, loss: Any, *, alone: bool = True, expected: dict[str, Any] | None = None
) -> dict[str, Any]:
    if expected is None:
        expected = run(stock, ppo_batch(SHAPES[name], **FLAGS, **(ALONE if alone else {})), loss)
    got = run(tree, ppo_batch(SHAPES[name], **FLAGS), loss)
    assert_equal_runs(expected, got, wanted_positions(ppo_batch(SHAPES[name])), ("log_probs", "entropy"))
    return got


@pytest.fixture(scope="module", params=SHAPES)
def shape_alone(request: pytest.FixtureRequest, stock: Any) -> tuple[str, dict[str, Any]]:
    """A hostile shape and stock verl's update on its rows, each alone."""
    loss = actor_loss("vanilla", "token-mean")
    return request.param, run(stock, ppo_batch(SHAPES[request.param], **FLAGS, **ALONE), loss)


@pytest.mark.parametrize("capacity", (3, 7, 20, 64))
def test_every_hostile_shape_at_every_budget(
    stock: Any, tree_engines: dict[int, Any], shape_alone: tuple[str, dict[str, Any]], capacity: int
) -> None:
    name, expected = shape_alone
    got = compare(stock, tree_engines[capacity], name, actor_loss("vanilla", "token-mean"), expected=expected)
    assert got["metrics"]["tree/partitions"].aggregate() >= got["metrics"]["tree/unique_tokens"].aggregate() / capacity


@pytest.mark.parametrize("agg_mode", ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"))
@pytest.mark.parametrize("loss_mode", LOSSES)
def test_every_policy_loss(stock: Any, tree_engines: dict[int, Any], loss_mode: str, agg_mode: str) -> None:
    alone = loss_mode not in BATCH_LOSSES
    compare(stock, tree_engines[7], "masks_differ_on_shared_prefix", actor_loss(loss_mode, agg_mode), alone=alone)


@pytest.fixture(scope="module")
def critics(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Stock verl's critic and ours, in partitions."""
    path = save_model(tmp_path_factory.mktemp("critic"), tiny_qwen3(tie_word_embeddings=False), value=True)
    tree = TreeConfig(mode="tree", max_tokens=7)
    return build_engine(path, tree=None, value=True), build_engine(path, tree=tree, value=True)


@pytest.mark.parametrize("name", SHAPES)
def test_value_loss(critics: tuple[Any, Any], name: str) -> None:
    stock, critic = critics
    config = CriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, loss_agg_mode="token-mean")
    loss = partial(value_loss, config=config)
    flags = {"return_model_output": True}
    expected = run(stock, ppo_batch(SHAPES[name], **flags, **ALONE), loss)
    got = run(critic, ppo_batch(SHAPES[name], **flags), loss)
    everywhere = torch.ones(sum(len(row.tokens) for row in SHAPES[name]), dtype=torch.bool)
    assert_equal_runs(expected, got, everywhere, ("values",))


@pytest.mark.parametrize(
    "build",
    (
        {"model": {"enable_gradient_checkpointing": True}},
        {"engine": {"reshard_after_forward": False}},
        {"model": {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}},
        {"model": {"lora_rank": 4, "target_modules": ["k_proj"], "enable_gradient_checkpointing": True}},
    ),
    ids=("checkpointing", "no_resharding", "lora", "lora_checkpointing"),
)
def test_settings_around_the_engine(model_path: Path, build: dict[str, Any]) -> None:
    torch.manual_seed(11)
    stock = build_engine(model_path, tree=None, **build)
    torch.manual_seed(11)
    tree = build_engine(model_path, tree=TreeConfig(mode="tree", max_tokens=7), **build)
    compare(stock, tree, "comb", actor_loss("vanilla", "token-mean"))


def test_inference_in_partitions(stock: Any, tree_engines: dict[int, Any]) -> None:
    rows = [*SHAPES["two_groups"][::-1], *SHAPES["strict_prefix"]]
    wanted = wanted_positions(ppo_batch(rows))
    flags = {"calculate_entropy": True, "calculate_sum_pi_squared": True}
    outputs = []
    for engine in (stock, tree_engines[3]):
        with engine.eval_mode(disable_auto_offload=True):
            outputs.append(engine.infer_batch(ppo_batch(rows, **flags))["model_output"])
    for key, expected in outputs[0].items():
        torch.testing.assert_close(
            outputs[1][key].values()[wanted], expected.values()[wanted], rtol=2e-5, atol=2e-5, msg=key
        )


def ops_of_one_update(engine: Any, loss: Any, monkeypatch: pytest.MonkeyPatch, data: Any = None) -> str:
    """The ops of an update, of "branches" or of a batch, as the engine agreed on them."""
    from tree_rl.training import run as engine_module

    seen: list[str] = []
    original = engine_module.run_in_step

    def recording(schedule: str, *args: Any) -> int:
        seen.append(schedule)
        return original(schedule, *args)

    monkeypatch.setattr(engine_module, "run_in_step", recording)
    run(engine, ppo_batch(SHAPES["branches"], **FLAGS) if data is None else data, loss)
    return seen[0]


@pytest.mark.parametrize("loss_mode, extra_passes", (("vanilla", 0), ("gspo", 1)))
def test_only_sequence_coupled_losses_off_policy_pay_an_extra_pass(
    tree_engines: dict[int, Any], loss_mode: str, extra_passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tree_engines[7]
    engine.step.knowledge.log_probs.forget()
    ops = ops_of_one_update(engine, actor_loss(loss_mode, "token-mean"), monkeypatch)
    assert ops.count("F") == (1 + extra_passes) * ops.count("B")


def test_on_policy_updates_reuse_the_log_probs_of_the_inference(
    stock: Any, tree_engines: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, loss = tree_engines[7], actor_loss("gspo", "seq-mean-token-mean")
    with engine.eval_mode(disable_auto_offload=True):
        engine.infer_batch(ppo_batch(SHAPES["branches"], calculate_entropy=True))
    ops = ops_of_one_update(engine, loss, monkeypatch)
    assert ops.count("F") == ops.count("B")
    with engine.eval_mode(disable_auto_offload=True):
        engine.infer_batch(ppo_batch(SHAPES["branches"], calculate_entropy=True))
    compare(stock, engine, "branches", loss)


def test_log_probs_are_forgotten_when_the_weights_move(model_path: Path) -> None:
    engine = build_engine(model_path, tree=TreeConfig(mode="tree", max_tokens=7))
    with engine.eval_mode(disable_auto_offload=True):
        engine.infer_batch(ppo_batch(SHAPES["branches"]))
    with engine.train_mode(disable_auto_offload=True):
        engine.train_batch(ppo_batch(SHAPES["branches"], **FLAGS), actor_loss("gspo", "token-mean"))
    assert not engine.step.knowledge.log_probs._rows


def test_only_the_last_inference_of_a_trained_model_is_remembered(model_path: Path) -> None:
    actor = build_engine(model_path, tree=TreeConfig(mode="tree", max_tokens=7))
    reference = build_engine(model_path, tree=TreeConfig(mode="tree"), engine={"forward_only": True})
    for engine in (actor, reference):
        with engine.eval_mode(disable_auto_offload=True):
            for name in ("branches", "comb"):
                engine.infer_batch(ppo_batch(SHAPES[name]))
    assert len(actor.step.knowledge.log_probs._rows) == len(SHAPES["comb"])
    assert not reference.step.knowledge.log_probs._rows


def test_two_runs_of_one_plan_are_bitwise_equal(tree_engines: dict[int, Any]) -> None:
    loss = actor_loss("vanilla", "token-mean")
    first, second = (run(tree_engines[7], ppo_batch(SHAPES["comb"], **FLAGS), loss) for _ in range(2))
    assert first["loss"] == second["loss"]
    for name, gradient in first["gradients"].items():
        assert torch.equal(gradient, second["gradients"][name]), name


@pytest.mark.parametrize("loss_mode", LOSSES)
def test_known_losses_are_classified(loss_mode: str) -> None:
    assert is_token_separable(actor_loss(loss_mode, "token-mean")) == (loss_mode in SEPARABLE_POLICY_LOSSES)


def test_an_unknown_loss_is_taken_for_coupled() -> None:
    assert not is_token_separable(lambda **_: None)
    assert not is_token_separable(partial(max, 1))
