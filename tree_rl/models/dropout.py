"""Dropout, however a model spells it: rows that share a token would share its draw, which rows alone would not."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from tree_rl.models.language_model import language_model

ADAPTER_CONFIG = "adapter_config.json"
WHY = "branches would share one dropout mask"
HEADS = ("classifier_dropout", "summary_")
"""Beginnings of keys of heads; a model without the head has the key, too."""


def dropout_reasons(model: nn.Module) -> list[str]:
    """Why a model cannot train on trees, one reason per probability above 0, each with the key that sets it to 0.

    Args:
        model: built; wrapped by adapters or by FSDP, or neither. Towers of images do not run.
    """
    drawn = dict(_drawn(language_model(model)))
    told, reasons = set[float](), []
    for owner, remedy, settings in _settings(model):
        found = dropout_settings(settings)
        # Heads last: their keys count where nothing else explains what a module draws.
        for key in sorted(found, key=lambda key: key.startswith(HEADS)):
            if not key.startswith(HEADS) or (found[key] in drawn.values() and found[key] not in told):
                told.add(found[key])
                reasons.append(f"{key}={found[key]}{owner}: {WHY}; set {remedy.format(key)}")
    untold = [(name, value) for name, value in drawn.items() if value not in told]
    if untold:
        name, value = untold[0]
        reasons.append(f"{name} drops out with probability {value}: {WHY}; build the model without it")
    return reasons


def dropout_settings(settings: Mapping[str, Any]) -> dict[str, float]:
    """The probabilities above 0 of a config."""
    return {key: value for key, value in settings.items() if "drop" in key and _is_probability(value)}


def _settings(model: nn.Module) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """What configures a model and its adapters: whose it is, how a key of it becomes 0, its settings."""
    for adapter in getattr(model, "peft_config", {}).values():
        yield " of the adapter", f'"{{}}": 0.0 in {ADAPTER_CONFIG} of model.lora_adapter_path', adapter.to_dict()
    config = getattr(model, "config", None)
    if config is None:
        return
    text = config.get_text_config()
    within = "" if text is config else "text_config."
    yield "", f"model.override_config.{within}{{}}=0", text.to_dict()


def _drawn(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Modules that drop out, and the probabilities that modules keep for functions which do."""
    for name, module in model.named_modules():
        drops = "drop" in type(module).__name__.lower()
        for attribute, value in vars(module).items():
            if "drop" not in attribute and not (drops and attribute in ("p", "prob", "rate")):
                continue
            # Adapters keep one probability per adapter.
            for each in value.values() if isinstance(value, dict) else (value,):
                if _is_probability(each):
                    yield f"{name}.{attribute}".lstrip("."), float(each)


def _is_probability(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
