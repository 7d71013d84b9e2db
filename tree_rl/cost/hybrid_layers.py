"""Layers of Nemotron-H, Falcon-H1 and Zamba 2, whose parts differ: their kinds and their parameters per token."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

PATTERN = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
"""Letters of `hybrid_override_pattern` in checkpoints of Nemotron-H."""
WITH_ATTENTION = frozenset({"attention", "hybrid"})
"""Kinds of layers with attention."""

PARTS = {
    "mamba": ("mamba",),
    "attention": ("attention",),
    "mlp": ("mlp",),
    "moe": ("experts",),
    "hybrid": ("mamba", "attention", "mlp"),
}
"""What a layer of each kind consists of."""


def hybrid_kinds(config: Mapping[str, Any]) -> list[str] | None:
    """Kinds of the layers of Nemotron-H, Falcon-H1 and Zamba 2, in order; None for any other family.

    Raises:
        ValueError: the config does not say which layers there are.
    """
    family = config.get("model_type")
    if family == "falcon_h1":
        return ["hybrid"] * _size(config, "num_hidden_layers")
    if family not in ("nemotron_h", "zamba2"):
        return None
    named = config.get("layers_block_type") or config.get("layer_types")
    kinds = list(named or (PATTERN.get(letter, letter) for letter in str(config.get("hybrid_override_pattern") or "")))
    unknown = sorted(set(kinds) - set(PARTS))
    if unknown or not kinds:
        raise ValueError(f"{family}: expected layers_block_type of {', '.join(PARTS)}, received {unknown or 'none'}")
    return kinds


def hybrid_parameters(config: Mapping[str, Any], kinds: Sequence[str], *, experts: int) -> int:
    """Parameters of all layers without norms, with this many experts in each layer that has any; a shared block of
    Zamba 2 counts in every layer that runs it.

    Raises:
        ValueError: names a size that is missing.
    """
    count: dict[str, Callable[[Mapping[str, Any]], int]]
    count = {"mamba": _mamba, "attention": _attention, "mlp": _mlp, "experts": partial(_experts, experts=experts)}
    needed = {part: count[part](config) for part in {part for kind in kinds for part in PARTS[kind]}}
    return sum(needed[part] for kind in kinds for part in PARTS[kind])


def repeated_parameters(config: Mapping[str, Any], kinds: Sequence[str]) -> int:
    """Parameters that `hybrid_parameters` counts more than once: Zamba 2's layers share their attention and MLP."""
    blocks = kinds.count("hybrid") - (config.get("num_mem_blocks") or 1)
    if config["model_type"] != "zamba2" or blocks <= 0:
        return 0
    return blocks * (_attention(config) - _size(config, "hidden_size") ** 2 + _mlp(config))


def attention_head_size(config: Mapping[str, Any]) -> int:
    """Size of an attention head; Zamba 2's attention reads two hidden states."""
    named: int | None = config.get("attention_head_dim") or config.get("head_dim")
    width = _reads(config) * _size(config, "hidden_size")
    return named or width // _size(config, "num_attention_heads")


def _mamba(config: Mapping[str, Any]) -> int:
    hidden = _size(config, "hidden_size")
    heads = _size(config, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    groups = _size(config, "n_groups", "mamba_n_groups", "mamba_ngroups")
    state = _size(config, "ssm_state_size", "mamba_d_state")
    if config.get("mamba_head_dim"):
        inner = heads * _size(config, "mamba_head_dim")
    else:
        inner = config.get("mamba_d_ssm") or _size(config, "mamba_expand") * hidden
    return hidden * (3 * inner + 2 * groups * state + heads)


def _attention(config: Mapping[str, Any]) -> int:
    heads = _size(config, "num_attention_heads")
    key_heads = config.get("num_key_value_heads") or heads
    width = _size(config, "hidden_size") * attention_head_size(config)
    # Zamba 2 projects the block's output once more, in each layer by its own matrix.
    again = _size(config, "hidden_size") ** 2 if _reads(config) > 1 else 0
    return width * (_reads(config) * (heads + 2 * key_heads) + heads) + again


def _mlp(config: Mapping[str, Any]) -> int:
    products = 2 if config["model_type"] == "nemotron_h" else 3
    return products * _size(config, "hidden_size") * _size(config, "intermediate_size")


def _experts(config: Mapping[str, Any], *, experts: int) -> int:
    hidden, latent = _size(config, "hidden_size"), config.get("moe_latent_size")
    routed = 2 * (latent or hidden) * _size(config, "moe_intermediate_size") * experts
    shared = 2 * hidden * _size(config, "moe_shared_expert_intermediate_size")
    return routed + shared + 2 * hidden * (latent or 0) + hidden * _size(config, "n_routed_experts")


def _reads(config: Mapping[str, Any]) -> int:
    """Hidden states that attention reads side by side."""
    return 2 if config["model_type"] == "zamba2" else 1


def _size(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if config.get(name):
            size: int = config[name]
            return size
    raise ValueError(f"{config['model_type']}: expected the size {names[0]} in its config.json, received none")
