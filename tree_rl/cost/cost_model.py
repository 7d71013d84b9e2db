"""Cost of a training step over rows or over their forest; load balance, `mode: auto`, plan and bench compare it.

Matrix products count per token, attention per visible (query, key) pair, the language-model head per trained token.
Legend: B rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from tree_rl.cost.hybrid_layers import WITH_ATTENTION, attention_head_size, hybrid_kinds, hybrid_parameters
from tree_rl.tree.forest import Forest
from tree_rl.tree.forest.jagged import Jagged
from tree_rl.tree.report.overlap import Overlap

Amount = TypeVar("Amount", float, np.ndarray)

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
"""Attention layers in a config's `layer_types`; all others are recurrent."""
FORWARD_AND_BACKWARD = 3
"""Operations of forward and backward over those of the forward: a backward has one product per operand's gradient."""
LEAST_GAIN = 1.02
"""Least flat cost over tree cost for which a group runs as a tree; a smaller gain would not pay for planning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Linear cost of a step, in a unit that the caller chooses."""

    per_token: float
    """Cost of one token in the projections and MLPs of all layers."""
    per_pair: float
    """Cost of one visible pair in all attention layers: its score and weighted value."""
    per_head_token: float = 0.0
    """Cost of one token in the language-model head."""
    per_forward: float = 0.0
    """Fixed cost of a forward and its backward; load balance and `mode: auto` ignore it."""

    def step(self, tokens: Amount, pairs: Amount, head_tokens: Amount) -> Amount:
        """Cost without the fixed part; the arguments are numbers, or arrays of one shape."""
        return self.per_token * tokens + self.per_pair * pairs + self.per_head_token * head_tokens

    def rows(self, lengths: np.ndarray, head_tokens: np.ndarray | None = None) -> np.ndarray:
        """Cost of each row run alone, float64 [B]; `head_tokens` are its tokens with a loss (int [B]; None: all)."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.step(tokens, tokens * (tokens + 1) / 2, tokens if head_tokens is None else head_tokens)

    def forest(self, forest: Forest, trained: Jagged | None = None) -> float:
        """Cost of a forest; the head runs once per unique token that any row trains.

        ``trained`` [B, L_b] is nonzero where the row's token has a loss; None means everywhere.
        """
        head_tokens = forest.num_unique if trained is None else np.count_nonzero(forest.rows_that_mark(trained))
        return self.step(float(forest.num_unique), float(forest.num_pairs), float(head_tokens))

    def tree_pays(self, forest: Forest, wanted: Jagged | None = None) -> bool:
        """True if running the forest is cheaper than running its rows one by one, by at least `LEAST_GAIN`.

        ``wanted`` [B, L_b] is nonzero where the next token's log-prob is wanted; None means everywhere. The forest's
        head runs only there; for flat rows the head runs on every token.
        """
        return float(self.rows(forest.row_index.lengths).sum()) >= LEAST_GAIN * self.forest(forest, wanted)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a decoder that decide its cost."""

    hidden: int
    """Width of the residual stream."""
    layers: int
    intermediate: int
    """Width of the gated MLP; with experts, the width of one times experts per token, plus the shared expert's."""
    heads: int
    """Number of query heads."""
    kv_heads: int
    head_dim: int
    vocab: int
    """Vocabulary size of the language-model head."""
    attention_layers: int | None = None
    """Layers with attention, whose cost grows with visible pairs; None: all. The others are recurrent; their
    projections count like those of attention."""
    active_experts: int = 0
    """Experts per token in each layer; 0 without experts."""
    layer_parameters: int | None = None
    """Parameters of all layers that one token multiplies with, where layers have unequal parts; None: every layer has
    attention's projections and a gated MLP."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value, least = getattr(self, name), 0 if name in ("attention_layers", "active_experts") else 1
            if value is not None and value < least:
                raise ValueError(f"ModelShape.{name}: expected at least {least}, received {value}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Read the sizes from a Hugging Face config.json.

        Raises:
            ValueError: names the sizes that are missing.
        """
        kinds = hybrid_kinds(config)
        if kinds is not None:
            config = {**config, "num_hidden_layers": len(kinds), "head_dim": attention_head_size(config)}
            if "moe" not in kinds:
                config |= {"num_experts_per_tok": 0, "moe_shared_expert_intermediate_size": 0}
        # A model with experts in every layer may have no `intermediate_size`.
        per_token = config.get("num_experts_per_tok") or 0
        width = "moe_intermediate_size" if per_token and config.get("moe_intermediate_size") else "intermediate_size"
        needed = ("hidden_size", "num_hidden_layers", width, "num_attention_heads", "vocab_size")
        missing = [name for name in needed if not config.get(name)]
        if missing:
            name = config.get("model_type") or "this model"
            raise ValueError(
                f"{name}: expected the sizes {', '.join(missing)} in its config.json, received none: it names them "
                "otherwise, and what a step costs is not known; train it without trees (model_type=language_model)"
            )
        heads = config["num_attention_heads"]
        shared = shared_expert_width(config)
        widths = config[width]
        # Gemma 3n has a width for each layer.
        mean_width = round(sum(widths) / len(widths)) if isinstance(widths, list | tuple) else widths
        intermediate = mean_width * max(per_token, 1) + shared
        layer_types = kinds or config.get("layer_types") or ()
        with_attention = sum(kind in ATTENTION_LAYERS | WITH_ATTENTION for kind in layer_types)
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            intermediate=intermediate,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            attention_layers=with_attention if with_attention < len(layer_types) else None,
            active_experts=per_token if width == "moe_intermediate_size" else 0,
            layer_parameters=None if kinds is None else hybrid_parameters(config, kinds, experts=per_token),
        )

    @property
    def num_attention_layers(self) -> int:
        """Number of layers with attention."""
        return self.layers if self.attention_layers is None else self.attention_layers

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's query, key, value and output projections."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def cost(self) -> CostModel:
        """Cost of a step in floating point operations, forward and backward."""
        parameters = self.layer_parameters
        if parameters is None:
            parameters = self.layers * (self.attention_parameters + 3 * self.hidden * self.intermediate)
        return CostModel(
            per_token=FORWARD_AND_BACKWARD * 2.0 * parameters,
            per_pair=FORWARD_AND_BACKWARD * 4.0 * self.num_attention_layers * self.heads * self.head_dim,
            per_head_token=FORWARD_AND_BACKWARD * 2.0 * self.hidden * self.vocab,
        )

    def tree_flops(self, overlap: Overlap) -> float:
        """Floating point operations of a step over the forest."""
        return self.cost.step(
            float(overlap.unique_tokens), float(overlap.unique_pairs), float(overlap.unique_head_tokens)
        )

    def flat_flops(self, overlap: Overlap) -> float:
        """Floating point operations of a step over the rows one by one."""
        return self.cost.step(float(overlap.flat_tokens), float(overlap.flat_pairs), float(overlap.flat_head_tokens))

    def flop_bound(self, overlap: Overlap) -> float:
        """Largest speed-up counted in operations, attention and head included; 1 without tokens."""
        tree = self.tree_flops(overlap)
        return self.flat_flops(overlap) / tree if tree else 1.0


def shared_expert_width(config: Mapping[str, Any]) -> int:
    """Width of the expert that every token visits; 0 if there is none."""
    width: int = config.get("shared_expert_intermediate_size") or config.get("moe_shared_expert_intermediate_size") or 0
    return width
