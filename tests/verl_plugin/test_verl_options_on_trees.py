"""verl's options of engine, optimizer, loss and critic do on trees what they do on rows run alone."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import ALONE, FLAGS, VOCAB, build_engine, ppo_batch, save_model, tiny_qwen3
from equivalence import alone, assert_equal_gradients, assert_equal_runs, assert_trains_as, everywhere, run
from hostile_rows import SHAPES
from tiny_sizes import sizes
from transformers import Qwen3MoeConfig
from verl_losses import actor_loss, critic_loss

from tree_rl.verl_plugin.options import TreeConfig

ROWS = SHAPES["branches"]
PARTITIONED = TreeConfig(mode="tree", max_tokens=17)


def loss_of(loss_mode: str = "vanilla", policy: dict[str, Any] | None = None, **options: Any) -> Any:
    return actor_loss(loss_mode, "token-mean", kl=False, policy=policy, **options)


@pytest.fixture(scope="module")
def expected(stock: Any) -> dict[str, Any]:
    return alone(stock, ROWS, loss_of())


@pytest.fixture
def process_wide_settings() -> Iterator[None]:
    """Put back what `full_determinism` sets for the whole process."""
    environment, enabled = dict(os.environ), torch.backends.cudnn.enabled
    yield
    os.environ.clear()
    os.environ.update(environment)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled = False, enabled


def test_options_without_effect_leave_the_gradients_of_rows_alone(model_path: Path, expected: dict[str, Any]) -> None:
    chunks = {"entropy_from_logits_with_chunking": True, "entropy_from_logits_chunk_size": 3}
    options = {**chunks, "entropy_checkpointing": True, "param_offload": True, "dtype": "float32"}
    model = {"use_remove_padding": False, "tiled_mlp": {"enabled": True, "num_shards": 2}}
    engine = build_engine(model_path, tree=PARTITIONED, engine=options, model=model)
    assert_trains_as(expected, engine, ROWS, loss_of())


@pytest.mark.parametrize("num_rows, forwards", ((1, 4), (4, 1)))
def test_rows_of_a_micro_batch_bound_a_forward(tree_engine: Any, stock: Any, num_rows: int, forwards: int) -> None:
    # Rows of 16 tokens, two groups of 20 unique tokens: 16 and 64 tokens a forward.
    rows = SHAPES["two_groups"]
    flags = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": num_rows}
    got = assert_trains_as(alone(stock, rows, loss_of()), tree_engine, rows, loss_of(), **flags)
    with tree_engine.eval_mode(disable_auto_offload=True):
        inferred = tree_engine.infer_batch(ppo_batch(rows, **FLAGS, **flags))
    for output in (got, inferred):
        assert output["metrics"]["tree/partitions"].aggregate() == forwards


def test_trees_do_not_call_the_entropy_that_use_torch_compile_compiles(
    model_path: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *_: called.append(function.__name__))
    engine = build_engine(model_path, tree=PARTITIONED, engine={"use_torch_compile": True})
    assert_trains_as(expected, engine, ROWS, loss_of())
    assert engine.compute_entropy_from_logits.__name__ == "<lambda>" and not called


@pytest.mark.usefixtures("process_wide_settings")
def test_full_determinism_repeats_every_bit(model_path: Path, expected: dict[str, Any]) -> None:
    engine = build_engine(model_path, tree=PARTITIONED, engine={"full_determinism": True, "seed": 5})
    assert os.environ["PYTHONHASHSEED"] == "5"
    first, second = (run(engine, ppo_batch(ROWS, **FLAGS), loss_of())["gradients"] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert_equal_gradients(expected["gradients"], first)


def test_weights_in_bfloat16_give_gradients_up_to_its_rounding(model_path: Path) -> None:
    engines = [build_engine(model_path, tree=tree, engine={"model_dtype": "bf16"}) for tree in (None, PARTITIONED)]
    stock, tree = (run(engine, ppo_batch(ROWS, **FLAGS), loss_of()) for engine in engines)
    for name, reference in stock["gradients"].items():
        assert reference.dtype == torch.bfloat16
        error, norm = (tree["gradients"][name] - reference).float().norm(), reference.float().norm()
        assert error <= 2**-8 * norm, name


SGD = {"optimizer": "SGD", "override_optimizer_config": {"momentum": 0.5}, "lr": 0.2, "weight_decay": 0.3}
SGD |= {"lr_scheduler_type": "cosine", "lr_warmup_steps": 1, "clip_grad": 0.05}
# A large eps: AdamW divides by the gradient's size, and so by a rounding error where the gradient is zero.
ONE_KERNEL = {"override_optimizer_config": {"fused": True, "eps": 1e-2}, "lr": 1e-2, "lr_scheduler_type": "cosine"}


@pytest.mark.parametrize("optimizer", [SGD, ONE_KERNEL], ids=["SGD", "AdamW in one kernel"])
def test_options_of_the_optimizer_move_the_weights_alike(model_path: Path, optimizer: dict[str, Any]) -> None:
    weights, rates = [], []
    for tree, engine_options in ((None, {}), (PARTITIONED, {"param_offload": True, "optimizer_offload": True})):
        engine = build_engine(model_path, tree=tree, optimizer=optimizer, engine=engine_options)
        for step in range(3):
            with engine.train_mode():
                engine.train_batch(ppo_batch(ROWS, seed=step, calculate_entropy=True), loss_of())
                rates.append(engine.lr_scheduler_step())
        weights.append({name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]})
    assert rates[:3] == rates[3:] and len(set(rates)) > 1
    for name, sent in weights[1].items():
        torch.testing.assert_close(sent, weights[0][name], rtol=1e-5, atol=1e-5)


PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts")
Q_PROJ = {"lora_rank": 4, "target_modules": ["q_proj"]}
LORA_OPTIONS: dict[str, tuple[dict[str, Any], set[str]]] = {
    # option: (options of the model, parts of the model that get an adapter)
    "lora_alpha": (Q_PROJ | {"lora_alpha": 3}, {"q_proj"}),
    "exclude_modules": ({"lora_rank": 4, "exclude_modules": ".*(mlp|[kvo]_proj).*"}, {"q_proj"}),
    "target_parameters": (Q_PROJ | {"target_parameters": ["mlp.experts.gate_up_proj"]}, {"q_proj", "experts"}),
    "lora.merge": (Q_PROJ | {"lora": {"merge": True}}, {"q_proj"}),
}


@pytest.fixture(scope="module")
def experts_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts, whose experts are parameters and not modules."""
    routing = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**sizes(vocab_size=VOCAB, intermediate_size=48), **routing)
    return save_model(tmp_path_factory.mktemp("experts"), config)


@pytest.mark.parametrize("option", LORA_OPTIONS)
def test_an_option_of_lora_trains_as_on_rows_alone(model_path: Path, experts_path: Path, option: str) -> None:
    model, parts = LORA_OPTIONS[option]
    engines = []
    for tree in (None, PARTITIONED):
        engine = build_engine(experts_path if option == "target_parameters" else model_path, tree=tree, model=model)
        torch.manual_seed(7)
        with torch.no_grad():
            # An untrained adapter changes nothing, and its first factor gets no gradient.
            for name, weight in engine.module.named_parameters():
                if "lora_" in name:
                    weight.to_local().normal_(std=0.2)
        engines.append(engine)
    got = assert_trains_as(alone(engines[0], ROWS, loss_of()), engines[1], ROWS, loss_of())
    assert all("lora_" in name for name in got["gradients"])
    assert {part for name in got["gradients"] for part in name.split(".")} & {*PARTS} == parts
    if option == "lora.merge":
        sent = [{name: weight.clone() for name, weight in engine.get_per_tensor_param()[0]} for engine in engines]
        assert sent[0].keys() - sent[1].keys() == {"lm_head.weight"}, "a tied weight is sent once"
        assert not any("lora_" in name for name in sent[1])
        assert all(torch.equal(sent[0][name], weight) for name, weight in sent[1].items())


BOUNDS = {"clip_ratio_low": 0.02, "clip_ratio_high": 0.9, "clip_ratio_c": 1.05}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.5}
COV = {"clip_cov_ratio": 0.3, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}
LOSS_OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # option: (loss, options of the actor, options of `policy_loss`)
    "clip_ratio": ("vanilla", {"clip_ratio": 0.05, "clip_ratio_low": None, "clip_ratio_high": None}, {}),
    "clip_ratio_low, _high, _c": ("vanilla", BOUNDS, {}),
    "loss_scale_factor": ("vanilla", {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 5}, {}),
    "entropy_coeff": ("vanilla", {"entropy_coeff": 0.5}, {}),
    "tau_pos, tau_neg": ("sapo", {"tau_pos": 3.0, "tau_neg": 4.0}, {}),
    "policy_loss.clip_cov_lb": ("clip_cov", {}, COV | {"clip_cov_lb": 0.1}),
    "policy_loss.clip_cov_ub": ("clip_cov", {}, COV | {"clip_cov_ub": 0.1}),
    "policy_loss.ppo_kl_coef": ("kl_cov", {}, {"kl_cov_ratio": 0.5, "ppo_kl_coef": 3.0}),
    "policy_loss.dro_beta": ("dro", {}, {"dro_beta": 2.0}),
    **{f"kl_loss_type={kind}": ("vanilla", KL | {"kl_loss_type": kind}, {}) for kind in ("kl", "abs", "low_var_kl+")},
}


@pytest.fixture(scope="module")
def tree_engine(model_path: Path) -> Any:
    return build_engine(model_path, tree=TreeConfig(mode="tree"))


@pytest.mark.parametrize("option", LOSS_OPTIONS)
def test_an_option_of_the_loss_trains_as_on_rows_alone(stock: Any, tree_engine: Any, option: str) -> None:
    loss_mode, actor, policy = LOSS_OPTIONS[option]
    flags = FLAGS | ({} if loss_mode in ("clip_cov", "kl_cov") else ALONE)
    expected = run(stock, ppo_batch(ROWS, **flags), loss_of(loss_mode, policy, **actor))
    got = assert_trains_as(expected, tree_engine, ROWS, loss_of(loss_mode, policy, **actor))
    without = run(tree_engine, ppo_batch(ROWS, **FLAGS), loss_of(loss_mode))["gradients"]
    assert any(not torch.allclose(got["gradients"][name], without[name]) for name in without), "the option does nothing"


def test_an_option_of_the_critic_trains_as_on_rows_alone(tmp_path: Path) -> None:
    path = save_model(tmp_path, tiny_qwen3(tie_word_embeddings=False), value=True)
    changed = critic_loss("seq-mean-token-sum-norm", loss_scale_factor=5, cliprange_value=0.05)
    flags = {"return_model_output": True}
    stock = run(build_engine(path, tree=None, value=True), ppo_batch(ROWS, **ALONE, **flags), changed)
    engine = build_engine(path, tree=PARTITIONED, value=True)
    got = run(engine, ppo_batch(ROWS, **flags), changed)
    assert_equal_runs(stock, got, everywhere(ROWS), ("values",))
    assert sum(run(engine, ppo_batch(ROWS, **flags), critic_loss())["loss"]) != pytest.approx(sum(got["loss"]))
