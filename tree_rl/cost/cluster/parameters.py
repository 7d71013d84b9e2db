"""How many parameters a decoder has, by the units that FSDP gathers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tree_rl.cost.cost_model import ModelShape

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in a config.json."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Numbers of parameters, norms left out."""

    per_layer: int
    """One decoder layer, all experts included: a unit of FSDP."""
    root: int
    """Embedding and language-model head, which FSDP gathers together."""
    layers: int

    @classmethod
    def of(cls, shape: ModelShape, config: Mapping[str, Any]) -> "Parameters":
        """Count those of a config.json's decoder; recurrent layers count like attention."""
        experts = next((config[name] for name in EXPERTS if config.get(name)), 0)
        width = shape.intermediate
        if experts and shape.active_experts:
            # The active width holds that of the shared expert, which there is once.
            shared = config.get("shared_expert_intermediate_size") or 0
            width = (shape.intermediate - shared) // shape.active_experts * experts + shared
        matrices = 1 if config.get("tie_word_embeddings") else 2
        return cls(
            per_layer=shape.attention_parameters + 3 * shape.hidden * width + shape.hidden * experts,
            root=matrices * shape.hidden * shape.vocab,
            layers=shape.layers,
        )

    @property
    def total(self) -> int:
        """All of them."""
        return self.layers * self.per_layer + self.root
