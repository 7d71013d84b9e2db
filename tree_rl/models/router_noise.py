"""Finds the random noise of Mixture-of-Experts routers in training: rows that share a token would share its noise."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

NOISE = "jitter"
"""Part of the names of such settings."""
SPARSEMIXER = {"phimoe": "router_jitter_noise"}
"""Settings, by model type, that also decide without noise which experts a router weighs."""


def noise_reasons(model: nn.Module, override: str) -> list[str]:
    """Why a model cannot train on trees: one reason per noise above 0, with the key that sets it to 0.

    Args:
        model: a language model.
        override: prefix of the config's keys on the command line.
    """
    config: Any = model.config
    found = dict(_settings(config.to_dict()))
    reasons = []
    for key, value in found.items():
        if key == SPARSEMIXER.get(config.model_type):
            why = (
                "its routers choose at random among experts this close, and 0 would give every chosen one the weight 1"
            )
            reasons.append(f"{key}={value}: {why}; train on rows with model_type=language_model")
        else:
            reasons.append(f"{key}={value}: branches would share the routers' noise; set {override}.{key}=0")
    unexplained = [(name, value) for name, value in _attributes(model) if value not in found.values()]
    if unexplained:
        name, value = unexplained[0]
        reasons.append(f"{name}={value}: branches would share the routers' noise; build the model without it")
    return reasons


def _settings(settings: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        elif NOISE in str(key) and _is_noise(value):
            yield prefix + key, value


def _attributes(model: nn.Module) -> Iterator[tuple[str, float]]:
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if NOISE in attribute and _is_noise(value):
                yield f"{name}.{attribute}", value


def _is_noise(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
