"""The cost model counts the parameters of hybrids whose layers have different parts."""

from typing import Any

import pytest
import torch
from recurrent_models import RECURRENT
from transformers import AutoConfig, AutoModelForCausalLM

from tree_rl.cost.cluster.parameters import Parameters
from tree_rl.cost.cost_model import WITHOUT_GATE, ModelShape

UNCOUNTED = ("norm", "conv1d", "adapter", "A_log", ".D", "dt_bias")


def matrices(family: str) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(RECURRENT[family])
    named = {name: p.shape for name, p in model.named_parameters() if ".layers." in name}
    return {name: shape for name, shape in named.items() if not any(part in name for part in UNCOUNTED)}


@pytest.mark.parametrize("family", ("nemotron_h", "falcon_h1", "zamba2"))
def test_parameters_are_those_of_the_model(family: str) -> None:
    config = RECURRENT[family].to_dict()
    shape = ModelShape.from_config(config)
    counted = sum(size.numel() for size in matrices(family).values())
    # Rounded to whole parameters of a mean layer.
    assert 0 <= counted - Parameters.of(shape, config).per_layer * shape.layers < shape.layers


@pytest.mark.parametrize("family", sorted(WITHOUT_GATE))
def test_a_mlp_without_a_gate_has_two_matrices(family: str) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 64}
    config = AutoConfig.for_model(family, **sizes, num_attention_heads=4, num_key_value_heads=4, head_dim=24)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and ".layers." in name)
    shape = ModelShape.from_config(config.to_dict())
    assert Parameters.of(shape, config.to_dict()).per_layer * shape.layers == counted


def test_a_token_visits_some_experts_and_every_shared_block() -> None:
    nemotron = ModelShape.from_config(RECURRENT["nemotron_h"].to_dict())
    experts = sum(s[1:].numel() * (s[0] - 2) for name, s in matrices("nemotron_h").items() if ".experts." in name)
    assert nemotron.layer_parameters == sum(size.numel() for size in matrices("nemotron_h").values()) - experts
    assert nemotron.num_attention_layers == 1 and nemotron.layers == 6
    zamba = ModelShape.from_config(RECURRENT["zamba2"].to_dict())
    blocks = [size.numel() for name, size in matrices("zamba2").items() if ".0.shared_transformer." in name]
    assert zamba.layer_parameters == sum(size.numel() for size in matrices("zamba2").values()) + sum(blocks)
    assert zamba.num_attention_layers == 3 and zamba.head_dim == 16


def test_published_nemotron_names_its_layers_by_letters() -> None:
    config = RECURRENT["nemotron_h"].to_dict()
    lettered = {name: value for name, value in config.items() if name != "layers_block_type"}
    assert ModelShape.from_config(lettered | {"hybrid_override_pattern": "ME*-ME"}) == ModelShape.from_config(config)


@pytest.mark.parametrize(
    ("missing", "complaint"),
    (
        ({"layers_block_type": None}, "nemotron_h: expected layers_block_type of mamba, .*, received none"),
        ({"layers_block_type": ["mamba", "rwkv"]}, r"received \['rwkv'\]"),
        ({"mamba_num_heads": None}, "nemotron_h: expected the size mamba_num_heads in its config.json"),
    ),
)
def test_what_is_missing_is_named(missing: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ModelShape.from_config(RECURRENT["nemotron_h"].to_dict() | missing)
