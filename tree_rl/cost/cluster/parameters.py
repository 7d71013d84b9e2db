"""Parameter counts of a decoder, by the units that FSDP gathers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tree_rl.cost.cost_model import ModelShape, mean_mlp_width, num_experts
from tree_rl.cost.hybrid_layers import hybrid_kinds, hybrid_parameters, repeated_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Parameter counts without norms."""

    per_layer: int
    """Parameters of one decoder layer with all experts: one FSDP unit."""
    root: int
    """Parameters of embedding and language-model head, which FSDP gathers together."""
    layers: int

    @classmethod
    def of(cls, shape: ModelShape, config: Mapping[str, Any]) -> "Parameters":
        """Count the parameters of a config.json's decoder."""
        experts = num_experts(config)
        width = shape.intermediate
        if experts and shape.active_experts:
            width = mean_mlp_width({"num_hidden_layers": shape.layers, **config}, experts)
        per_layer = 3 * shape.hidden * width + shape.hidden * experts
        per_layer += _delta_net_mixers(shape, config) // shape.layers or shape.attention_parameters
        kinds = hybrid_kinds(config)
        if kinds is not None:
            counted = hybrid_parameters(config, kinds, experts=experts) - repeated_parameters(config, kinds)
            per_layer = counted // len(kinds)
        matrices = 1 if config.get("tie_word_embeddings") else 2
        return cls(
            per_layer=per_layer,
            root=matrices * shape.hidden * shape.vocab,
            layers=shape.layers,
        )

    @property
    def total(self) -> int:
        """Parameters of the whole model."""
        return self.layers * self.per_layer + self.root


def _delta_net_mixers(shape: ModelShape, config: Mapping[str, Any]) -> int:
    """Parameters of all Gated DeltaNets and gated attentions of Qwen3-Next and Qwen3.5; 0 in other families."""
    values = (config.get("linear_num_value_heads") or 0) * (config.get("linear_value_head_dim") or 0)
    if not values:
        return 0
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    # Queries, keys, values, gate, decay and strength of a step; output.
    delta_net = shape.hidden * (2 * keys + 3 * values + 2 * config["linear_num_value_heads"])
    attention = shape.attention_parameters + shape.hidden * shape.heads * shape.head_dim
    with_attention = shape.num_attention_layers
    return with_attention * attention + (shape.layers - with_attention) * delta_net
