"""Sizes of a model from its Hugging Face config.json, for the FLOP bound."""

import json
from pathlib import Path

from tree_rl.inspection.row import RowFileError
from tree_rl.tree.cost import ModelShape

QWEN2_5_7B = ModelShape(hidden=3584, layers=28, intermediate=18944, heads=28, kv_heads=4, head_dim=128, vocab=152064)
"""What the FLOP bound assumes when no model is named."""


def read_model_shape(path: Path) -> ModelShape:
    """Sizes from a config.json or its folder; in a mixture of experts, those of the experts that a token visits.

    Raises:
        RowFileError: no such file, or a size is missing.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise RowFileError(f"--model {path}: expected a config.json or its folder, found none")
    config = json.loads(file.read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    try:
        return ModelShape.from_config(config)
    except ValueError as error:
        raise RowFileError(f"--model {file}: {error}") from error
