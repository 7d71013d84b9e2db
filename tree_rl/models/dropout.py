"""Finds dropout in a model, under any name: rows that share a token would share its dropout mask, unlike rows alone."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from tree_rl.models.language_model import language_model

ADAPTER_CONFIG = "adapter_config.json"
WHY = "branches would share one dropout mask"
HEADS = ("classifier_dropout", "summary_")
"""Prefixes of the dropout keys of heads; a config has these keys even if the model has no such head."""


def dropout_reasons(model: nn.Module) -> list[str]:
    """Why a model cannot train on trees: one reason per dropout probability above 0, with the key that sets it to 0.

    Only the language model of a multimodal model is checked. The model may be wrapped by adapters or FSDP.
    """
    modules = dict(_module_probabilities(language_model(model)))
    explained, reasons = set[float](), []
    for owner, remedy, settings in _settings(model):
        found = dropout_settings(settings)
        # Keys of heads come last: they count only if no other key explains a module's probability.
        for key in sorted(found, key=lambda key: key.startswith(HEADS)):
            if not key.startswith(HEADS) or (found[key] in modules.values() and found[key] not in explained):
                explained.add(found[key])
                reasons.append(f"{key}={found[key]}{owner}: {WHY}; set {remedy.format(key)}")
    unexplained = [(name, value) for name, value in modules.items() if value not in explained]
    if unexplained:
        name, value = unexplained[0]
        reasons.append(f"{name} drops out with probability {value}: {WHY}; build the model without it")
    return reasons


def dropout_settings(settings: Mapping[str, Any]) -> dict[str, float]:
    """The dropout probabilities above 0 in a config."""
    return {key: value for key, value in settings.items() if "drop" in key and _is_probability(value)}


def _settings(model: nn.Module) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """For the model and each adapter: owner, template that says how to set a key to 0, and settings."""
    for adapter in getattr(model, "peft_config", {}).values():
        yield " of the adapter", f'"{{}}": 0.0 in {ADAPTER_CONFIG} of model.lora_adapter_path', adapter.to_dict()
    config = getattr(model, "config", None)
    if config is None:
        return
    text = config.get_text_config()
    within = "" if text is config else "text_config."
    yield "", f"model.override_config.{within}{{}}=0", text.to_dict()


def _module_probabilities(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Probabilities of dropout modules, and those that modules keep for functional dropout, by attribute name."""
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
