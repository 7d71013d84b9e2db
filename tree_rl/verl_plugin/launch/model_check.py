"""What a model's own config says before Ray starts: built without weights, it is checked as the workers check it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig

from tree_rl.models import UnsupportedModelError, check_model
from tree_rl.models.language_model import is_wrapper
from tree_rl.models.support import has_recurrent_layers
from tree_rl.verl_plugin.compat import get_hf_auto_model_class, update_model_config

OVERRIDES = "override_config"
IMAGE_KEYS = {"image_key": "images", "video_key": "videos", "audio_key": "audios"}
"""Keys of `data` that name a column -> verl's defaults."""


def refuse_model_of_job(model: DictConfig, *, key: str, rollout: str | None = None) -> None:
    """Refuse a model on this machine that trees cannot run exactly.

    Only a checkpoint that also reads images is built here: for others the workers' own refusal comes as early as their
    weights. A name on a hub and a model with code of its own are left to the workers, too.

    Args:
        model: a role's `model` node.
        key: where it stands in the config.
        rollout: `rollout.name` of a job that generates.

    Raises:
        UnsupportedModelError: names key, path, reason and remedy.
    """
    folder = Path(str(model.path)).expanduser()
    file = folder / "config.json"
    if not file.exists() or "auto_map" in json.loads(file.read_text()):
        return
    config: Any = AutoConfig.from_pretrained(folder)
    given = model.get(OVERRIDES, None) or {}
    overrides = OmegaConf.to_container(given, resolve=True) if isinstance(given, DictConfig) else dict(given)
    assert isinstance(overrides, dict)
    update_model_config(config, override_config_kwargs=overrides.get("model_config", overrides))
    if config.get_text_config() is config and not hasattr(config, "vision_config"):
        return
    with torch.device("meta"):
        built = get_hf_auto_model_class(config).from_config(config, attn_implementation="eager")
    try:
        check_model(built)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{key}.path={model.path}: {error}") from None
    if rollout == "hf" and is_wrapper(built) and has_recurrent_layers(built):
        raise UnsupportedModelError(
            f"{key}.path={model.path}: rollout.name=hf runs attention layers alone, and this model has layers that "
            "carry a state; set actor_rollout_ref.rollout.name=vllm or sglang"
        )


def refuse_rows_with_images(data: DictConfig, files: Sequence[str]) -> None:
    """Refuse parquet files on this machine in whose rows verl's data set would find images or videos.

    Args:
        data: the config's `data` node.
        files: its keys of a path or a list of paths.

    Raises:
        ValueError: names the key, the file, the row and its column.
    """
    columns = [str(data.get(key, None) or default) for key, default in IMAGE_KEYS.items()]
    for key in files:
        given = data.get(key, None) or ()
        for path in [given] if isinstance(given, str) else given:
            file = Path(str(path)).expanduser()
            if file.suffix == ".parquet" and file.exists():
                _refuse_file(file, columns, f"data.{key}={path}")


def _refuse_file(file: Path, columns: Sequence[str], named: str) -> None:
    parquet = pq.ParquetFile(file)
    row = 0
    for batch in parquet.iter_batches(batch_size=64, columns=[c for c in columns if c in parquet.schema_arrow.names]):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            # An empty list and a null are no image.
            for offset, value in enumerate(column):
                if value.is_valid and (not hasattr(value, "values") or len(value)):
                    raise ValueError(
                        f"{named}: row {row + offset} has {name}; trees run rows of text: drop rows with images, or "
                        "train without trees (actor_rollout_ref.model.model_type=language_model and verl's trainer)"
                    )
        row += len(batch)
