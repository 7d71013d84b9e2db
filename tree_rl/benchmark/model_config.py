"""Configs of transformers for the models that are measured with random weights."""

from transformers import (
    DeepseekV2Config,
    Glm4MoeLiteConfig,
    NemotronHConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from tree_rl.cost.model_sizes import ModelSize

CONFIGS: dict[str, type[PretrainedConfig]] = {
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "qwen3_5": Qwen3_5TextConfig,
    "deepseek_v2": DeepseekV2Config,
    "glm4_moe_lite": Glm4MoeLiteConfig,
    "nemotron_h": NemotronHConfig,
}
"""`ModelSize.family` -> class of the model's config."""


def config_of(size: ModelSize) -> PretrainedConfig:
    """The config of a model of this size."""
    return CONFIGS[size.family](**size.config)
