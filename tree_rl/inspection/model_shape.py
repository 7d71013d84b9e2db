"""Sizes of a model from its Hugging Face config.json, for the FLOP bound."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tree_rl.cost.cost_model import ModelShape
from tree_rl.cost.model_sizes import MODEL_SIZES, known_name
from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.hub_cache import folder_of
from tree_rl.inspection.files.json_text import parse_json
from tree_rl.inspection.files.open_file import read_bytes
from tree_rl.inspection.files.quoting import quoted, quoted_path

QWEN2_5_7B = ModelShape(hidden=3584, layers=28, intermediate=18944, heads=28, kv_heads=4, head_dim=128, vocab=152064)
"""Model that the FLOP bound assumes if none is named."""
SIZES = (
    *("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "first_k_dense_replace"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim"),
    *("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"),
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_ssm", "mamba_expand"),
    *("n_mamba_heads", "mamba_ngroups", "attention_head_dim"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size"),
)
WIDTHS = "intermediate_size"
"""The size of which a config.json can have a list: Gemma 3n has one for each layer."""
LARGEST = 2**31 - 1
MOST_LAYERS = 2**16
"""Most layers of a decoder: predictions go through them one by one."""


def read_model_shape(path: Path) -> ModelShape:
    """Sizes from a config.json, its folder, an id in the local Hugging Face cache, or a name in `MODEL_SIZES`.

    For a Mixture-of-Experts model, those of the experts that one token visits.

    Raises:
        InputError: no such file, not an object, or a size is missing or not a count.
    """
    return read_model_config(path)[0]


def read_model_config(path: Path) -> tuple[ModelShape, Mapping[str, Any]]:
    """The result of `read_model_shape`, whose errors it raises, and the decoder's entries of the file."""
    if not os.path.exists(path) and path.name == str(path) and path.suffix != ".json":
        name = known_name(path.name)
        if name is None:
            raise InputError(
                f"--model {quoted(path.name)}: expected a config.json, its folder, an id in the local Hugging Face "
                f"cache, or one of {', '.join(MODEL_SIZES)}; found none"
            )
        return MODEL_SIZES[name].shape, MODEL_SIZES[name].config
    path = folder_of(path, "--model", "config.json")
    file = path / "config.json" if os.path.isdir(path) else path
    try:
        config = _object(parse_json(read_bytes(file), quoted_path(file)), "an object")
        # In a model with a vision tower, the decoder's sizes are in text_config.
        if config.get("text_config") is not None:
            config = _object(config["text_config"], "text_config: an object")
        for name in SIZES:
            size = config.get(name)
            sizes = size if name == WIDTHS and isinstance(size, list) and size else [size]
            if size is not None and not all(type(one) is int and 0 <= one <= LARGEST for one in sizes):
                raise InputError(f"{name}: expected a count, received {_typed(size)}")
        if (layers := config.get("num_hidden_layers") or 0) > MOST_LAYERS:
            raise InputError(f"num_hidden_layers: expected at most {MOST_LAYERS}, received {layers}")
        for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
            kinds = config.get(name)
            if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
                raise InputError(f"{name}: expected a list of names, received {_typed(kinds)}")
        return ModelShape.from_config(config), config
    except ValueError as error:
        raise InputError(
            f"--model {quoted_path(path)}: expected a config.json or its folder: {error}; correct it or name another"
        ) from error


def _object(value: Any, expected: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise InputError(f"expected {expected}, received {_typed(value)}")


def _typed(value: Any) -> str:
    return f"{type(value).__name__} {quoted(value)}"
