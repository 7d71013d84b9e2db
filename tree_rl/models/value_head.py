"""A critic for every family that trees can train: the base model with a head of one row.

transformers has such a class (`...ForTokenClassification`) for some families only. For the others it is built here from
the same parts, in place of the value head that verl would take from TRL.
"""

from transformers import AutoModelForTokenClassification, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForTokenClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

SWITCHED_OFF = {"classifier_dropout": 0.0, "hidden_dropout": 0.0, "summary_dropout_prob": 0.0}
"""Dropouts of the head under the names that families give them, as verl sets them."""


def prepare_value_config(config: PretrainedConfig) -> None:
    """Ask for one value per token without dropout, in place, and let transformers know a class for this config.

    Raises:
        ValueError: transformers has no base model of that type, on which a head could stand.
    """
    config.num_labels = 1
    for name, value in SWITCHED_OFF.items():
        setattr(config, name, value)
    kind = type(config)
    if kind in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return
    # Code of a checkpoint's own brings its own class.
    if "AutoModelForTokenClassification" in (getattr(config, "auto_map", None) or {}):
        return
    AutoModelForTokenClassification.register(kind, _value_class(config))


def _value_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING):
        if type(config) in mapping and type(config) in MODEL_MAPPING:
            generator = mapping[type(config)]
            break
    else:
        raise ValueError(
            f"model_type={config.model_type}: transformers has neither a token classifier nor a base model of this "
            "type, so a critic cannot stand on it; choose another critic.model.path, or an estimator without a critic "
            "(algorithm.adv_estimator=grpo)"
        )
    # The last ancestor of the family: its weights' initialisation, names and what may not be split.
    family = next(one for one in generator.__mro__ if one.__name__.endswith("PreTrainedModel"))
    name = f"{family.__name__.removesuffix('PreTrainedModel')}ForTokenClassification"
    members = {
        "config_class": type(config),
        "base_model_prefix": generator.base_model_prefix,
        # transformers reads the file of a class to see whether its attention can be chosen.
        "__module__": generator.__module__,
    }
    built: type[PreTrainedModel] = type(name, (GenericForTokenClassification, family), members)
    return built
