"""A critic trains on trees as on rows alone also where transformers has no token classifier of its family.

There verl 0.9.1 takes TRL's value head: a linear layer on the last hidden states of the model that generates.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_harness import ALONE, VOCAB, build_engine, ppo_batch, save_model
from equivalence import assert_equal_runs, everywhere, infer, run
from hostile_rows import SHAPES
from latent_models import latent_configs
from tiny_families import GATED_DELTA_NET, RECURRENT, save_hybrid, wrapped_apart
from tiny_sizes import sizes
from verl_losses import critic_loss
from wrapped_models import wrapped_config, wrapped_model

from tree_rl.models.value_head import prepare_value_config
from tree_rl.verl_plugin.options import TreeConfig

OURS = {"vocab_size": VOCAB, "max_position_embeddings": 512, "initializer_range": 0.1}
SIZES: dict[str, Any] = sizes(**OURS, head_dim=None)
PER_LAYER = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
FAMILIES: dict[str, transformers.PretrainedConfig] = {
    "granite": transformers.GraniteConfig(**SIZES, residual_multiplier=0.5),
    "gemma4": transformers.Gemma4TextConfig(**SIZES, head_dim=8, global_head_dim=8, **PER_LAYER),
    "qwen3.5": GATED_DELTA_NET["qwen3_5"],
    "olmoe": transformers.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    **latent_configs(**OURS),
    **{family: RECURRENT[family] for family in ("lfm2", "nemotron_h", "falcon_h1", "zamba2")},
}
DEFAULT = ("gemma4", "lfm2", "qwen3.5", "nemotron_h", "zamba2")
PARAMS = [pytest.param(family, marks=() if family in DEFAULT else pytest.mark.slow) for family in FAMILIES]


@pytest.fixture(scope="module", params=PARAMS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp(request.param), FAMILIES[request.param])


def critic(path: Path, tree: TreeConfig | None) -> Any:
    return build_engine(path, tree=tree, value=True, engine=wrapped_apart(path))


def assert_trains(path: Path, shapes: tuple[str, ...]) -> Any:
    """A critic's updates on trees are stock verl's on rows alone; returns it."""
    loss = critic_loss()
    stock, tree = critic(path, None), critic(path, TreeConfig(mode="tree", max_tokens=20))
    for shape in shapes:
        expected = run(stock, ppo_batch(SHAPES[shape], return_model_output=True, **ALONE), loss)
        got = run(tree, ppo_batch(SHAPES[shape], return_model_output=True), loss)
        assert_equal_runs(expected, got, everywhere(SHAPES[shape]), ("values",))
        assert {"score.weight", "score.bias"} <= got["gradients"].keys()
    return tree


def assert_values_are_a_linear_layer(engine: Any, generator: Any) -> None:
    """On the last hidden states of the model that generates."""
    data = ppo_batch(SHAPES["branches"])
    values = infer(engine, data)["values"].unbind()
    weight, bias = (getattr(engine.module.score, name).full_tensor() for name in ("weight", "bias"))
    for row, got in zip(data["input_ids"].unbind(), values, strict=True):
        hidden = generator.eval().base_model(input_ids=row[None], use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(got, (hidden @ weight.T + bias)[:, 0], rtol=2e-5, atol=2e-5)


def test_it_trains_as_on_rows_alone(path: Path) -> None:
    tree = assert_trains(path, ("comb", "strict_prefix"))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    assert_values_are_a_linear_layer(tree, model)


@pytest.mark.parametrize("family", ("qwen3_5", pytest.param("qwen3_vl_moe", marks=pytest.mark.slow)))
def test_it_stands_on_a_model_that_also_reads_images(tmp_path: Path, family: str) -> None:
    wrapped_model(wrapped_config(family)).save_pretrained(tmp_path)
    tree = assert_trains(tmp_path, ("comb",))
    generator = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager")
    assert_values_are_a_linear_layer(tree, generator)


def test_a_class_that_transformers_has_is_left_alone(tmp_path: Path) -> None:
    save_model(tmp_path, transformers.AutoConfig.for_model("qwen3", **SIZES), value=True)
    engine = critic(tmp_path, TreeConfig(mode="tree"))
    assert isinstance(engine.module, transformers.Qwen3ForTokenClassification)


def test_a_type_without_a_base_model_names_it_and_the_remedy() -> None:
    class StrangeConfig(transformers.PretrainedConfig):
        model_type = "strange"

    with pytest.raises(ValueError, match=r"^model_type=strange: .*critic\.model\.path.*adv_estimator"):
        prepare_value_config(StrangeConfig())
