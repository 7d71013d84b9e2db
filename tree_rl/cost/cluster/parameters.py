"""Parameter counts of a decoder, by the units that FSDP gathers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tree_rl.cost.cost_model import ModelShape, mean_mlp_width
from tree_rl.cost.hybrid_layers import hybrid_kinds, hybrid_parameters, repeated_parameters

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of config.json for the number of experts."""


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
        """Count the parameters of a config.json's decoder; recurrent layers count like attention layers."""
        experts = next((config[name] for name in EXPERTS if config.get(name)), 0)
        width = shape.intermediate
        if experts and shape.active_experts:
            width = mean_mlp_width({"num_hidden_layers": shape.layers, **config}, experts)
        per_layer = shape.attention_parameters + 3 * shape.hidden * width + shape.hidden * experts
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
