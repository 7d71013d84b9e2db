"""A critic class for every model family that trees can train: the base model with a one-row head.

transformers has such a class (`...ForTokenClassification`) only for some families. For the others it is built here from
the same parts, instead of the value head that verl would take from TRL.
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
"""The head's dropout keys in the various families, with the values that verl sets."""


def prepare_value_config(config: PretrainedConfig) -> None:
    """Set one output without dropout in `config`, and register a critic class for it if transformers has none.

    Raises:
        ValueError: transformers has no base model of this type.
    """
    config.num_labels = 1
    for name, value in SWITCHED_OFF.items():
        setattr(config, name, value)
    kind = type(config)
    if kind in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return
    # The checkpoint's own code brings a class.
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
            "type, so there is no critic for it; choose another critic.model.path, or an estimator without a critic "
            "(algorithm.adv_estimator=grpo)"
        )
    # The family's base class, with weight initialisation, parameter names and modules that must not be split.
    family = next(one for one in generator.__mro__ if one.__name__.endswith("PreTrainedModel"))
    name = f"{family.__name__.removesuffix('PreTrainedModel')}ForTokenClassification"
    members = {
        "config_class": type(config),
        "base_model_prefix": generator.base_model_prefix,
        # transformers reads the source file of a class's module to see whether its attention can be chosen.
        "__module__": generator.__module__,
    }
    built: type[PreTrainedModel] = type(name, (GenericForTokenClassification, family), members)
    return built
