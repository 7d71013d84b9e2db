"""Sizes of a model from its Hugging Face config.json, for the FLOP bound."""

import json
from pathlib import Path

from tree_rl.inspection.row import RowFileError
from tree_rl.tree.cost import ModelShape

QWEN2_5_7B = ModelShape(hidden=3584, layers=28, intermediate=18944, heads=28, kv_heads=4, head_dim=128, vocab=152064)
"""What the FLOP bound assumes when no model is named."""


def read_model_shape(path: Path) -> ModelShape:
    """Read the sizes that decide a decoder's cost.

    Args:
        path: a config.json, or the folder that holds it.

    Returns:
        The sizes; for a mixture of experts, those of the experts that one token visits.

    Raises:
        RowFileError: no such file, or a size is missing.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise RowFileError(f"--model {path}: expected a config.json or its folder, found none")
    config = json.loads(file.read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    needed = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if name not in config]
    if missing:
        raise RowFileError(f"--model {file}: expected the sizes {', '.join(missing)}, received none")
    heads = config["num_attention_heads"]
    intermediate = config["intermediate_size"]
    if config.get("num_experts_per_tok"):
        intermediate = config.get("moe_intermediate_size", intermediate) * config["num_experts_per_tok"]
    return ModelShape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        intermediate=intermediate,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
    )
