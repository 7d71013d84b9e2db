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
MOE_WIDTH = "moe_intermediate_size"
WITHOUT_GATE = frozenset({"arcee", "gpt_neox", "nemotron", "persimmon", "phi", "starcoder2"})
"""Model types whose MLP has no gate."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of config.json for the number of experts."""
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
class LatentRanks:
    """Projections of multi-head latent attention, through vectors narrower than all heads."""

    query: int | None
    """Width of the queries' latent vector; None projects queries directly."""
    key_value: int
    """Width of the latent vector of keys and values."""
    rotary: int
    """Part of a key's head size that has rotary positions; all heads share it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a decoder that decide its cost."""

    hidden: int
    """Width of the residual stream."""
    layers: int
    intermediate: int
    """Mean width of a layer's gated MLP; with experts, of those that one token visits, shared ones included."""
    heads: int
    """Number of query heads."""
    kv_heads: int
    head_dim: int
    """Head size of queries and keys."""
    vocab: int
    """Vocabulary size of the language-model head."""
    attention_layers: int | None = None
    """Layers with attention, whose cost grows with visible pairs; None: all. The others are recurrent; their
    projections count like those of attention."""
    active_experts: int = 0
    """Experts per token in each layer; 0 without experts."""
    value_dim: int | None = None
    """Head size of values; None: that of keys."""
    latent: LatentRanks | None = None
    """Multi-head latent attention; None: every head has projections of its own."""
    layer_parameters: int | None = None
    """Parameters of all layers that one token multiplies with, where layers have unequal parts; None: every layer has
    attention's projections and a gated MLP."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if name == "latent":
                continue
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
                config |= {"num_experts_per_tok": 0, "moe_shared_expert_intermediate_size": 0, "n_shared_experts": 0}
        # A model with experts in every layer may have no `intermediate_size`.
        per_token = config.get("num_experts_per_tok") or 0
        width = _width_of_expert(config)
        needed: tuple[str, ...] = ("hidden_size", "num_hidden_layers", width, "num_attention_heads", "vocab_size")
        if config.get("kv_lora_rank"):
            needed += ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if config.get("linear_num_value_heads") and config.get("linear_value_head_dim"):
            needed += ("linear_num_key_heads", "linear_key_head_dim")
        missing = [name for name in needed if not config.get(name)]
        if missing:
            name = config.get("model_type") or "this model"
            raise ValueError(
                f"{name}: expected the sizes {', '.join(missing)} in its config.json, received none, so "
                "the cost of a step is unknown; train it without trees (model_type=language_model)"
            )
        layer_types = kinds or config.get("layer_types") or ()
        with_attention = sum(kind in ATTENTION_LAYERS | WITH_ATTENTION for kind in layer_types)
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            intermediate=mean_mlp_width(config, per_token),
            heads=config["num_attention_heads"],
            vocab=config["vocab_size"],
            attention_layers=with_attention if with_attention < len(layer_types) else None,
            active_experts=per_token if num_experts(config) or width == MOE_WIDTH else 0,
            layer_parameters=None if kinds is None else hybrid_parameters(config, kinds, experts=per_token),
            **(_latent_heads(config) if config.get("kv_lora_rank") else _heads(config)),
        )

    @property
    def num_attention_layers(self) -> int:
        """Number of layers with attention."""
        return self.layers if self.attention_layers is None else self.attention_layers

    @property
    def value_size(self) -> int:
        """Head size of values."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def key_value_width(self) -> int:
        """Numbers in one token's keys and values of one layer."""
        return self.kv_heads * (self.head_dim + self.value_size)

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's query, key, value and output projections."""
        queries, outputs = self.heads * self.head_dim, self.heads * self.value_size
        if self.latent is None:
            return self.hidden * (queries + outputs + self.key_value_width)
        rank, rotary = self.latent.key_value, self.latent.rotary
        from_latent = self.heads * (self.head_dim - rotary) + outputs
        of_queries = self.hidden * queries
        if self.latent.query is not None:
            of_queries = self.latent.query * (self.hidden + queries)
        return of_queries + self.hidden * (rank + rotary) + rank * from_latent + self.hidden * outputs

    @property
    def cost(self) -> CostModel:
        """Cost of a step in floating point operations, forward and backward."""
        parameters = self.layer_parameters
        if parameters is None:
            parameters = self.layers * (self.attention_parameters + 3 * self.hidden * self.intermediate)
        pair = 2.0 * self.num_attention_layers * self.heads * (self.head_dim + self.value_size)
        return CostModel(
            per_token=FORWARD_AND_BACKWARD * 2.0 * parameters,
            per_pair=FORWARD_AND_BACKWARD * pair,
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


def num_experts(config: Mapping[str, Any]) -> int:
    """Routed experts of a layer in a config.json; 0 without experts."""
    return next((config[name] for name in EXPERTS if config.get(name)), 0)


def mean_mlp_width(config: Mapping[str, Any], experts: int) -> int:
    """Mean width of a layer's gated MLP in a config.json, if this many routed experts count, plus the shared ones.

    An MLP without a gate has two matrices of three: it counts as a gated one of two thirds of its width.
    """
    width = _width_of_expert(config)
    widths = config[width]
    # Gemma 3n has a width for each layer.
    mean_width = round(sum(widths) / len(widths)) if isinstance(widths, list | tuple) else widths
    named = config.get("shared_expert_intermediate_size") or config.get("moe_shared_expert_intermediate_size")
    shared = named or mean_width * (config.get("n_shared_experts") or 0)
    sparse, layers = mean_width * max(experts, 1) + shared, config["num_hidden_layers"]
    kinds = config.get("mlp_layer_types") or ()
    dense = min(kinds.count("dense") if kinds else config.get("first_k_dense_replace") or 0, layers)
    if config.get("model_type") in WITHOUT_GATE:
        return round(2 * sparse / 3)
    if width != MOE_WIDTH or not dense:
        return int(sparse)
    return round((dense * config["intermediate_size"] + (layers - dense) * sparse) / layers)


def _width_of_expert(config: Mapping[str, Any]) -> str:
    """Key of the width of an expert, or of the MLP of a model without experts."""
    return MOE_WIDTH if config.get("num_experts_per_tok") and config.get(MOE_WIDTH) else "intermediate_size"


def _heads(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    return {
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
    }


def _latent_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of multi-head latent attention, where `head_dim` is that of the rotary part and every head has keys."""
    rotary = config["qk_rope_head_dim"]
    return {
        "kv_heads": config["num_attention_heads"],
        "head_dim": config["qk_nope_head_dim"] + rotary,
        "value_dim": config["v_head_dim"],
        "latent": LatentRanks(query=config.get("q_lora_rank"), key_value=config["kv_lora_rank"], rotary=rotary),
    }
