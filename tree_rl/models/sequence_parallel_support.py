"""Which sizes of sequence parallelism (Ulysses) a model's heads allow."""

from transformers import PretrainedConfig

KEY = "ulysses_sequence_parallel_size"
SIZES = (2, 4, 8)
"""Offered instead of a size that does not fit."""
SPLIT = ("num_attention_heads", "linear_num_value_heads", "mamba_n_heads")
"""Heads that ranks share out: their number is a multiple of the size."""
SHARED = ("num_key_value_heads", "linear_num_key_heads", "mamba_n_groups")
"""Heads that several of the others read, repeated where there are fewer than ranks: their number is a multiple of the
size, or divides it."""
CONVOLUTION = "conv_L_cache"
"""Where a config has it, channels of a short convolution are shared out."""


def check_sequence_parallel(config: PretrainedConfig, size: int) -> None:
    """Refuse a size that a model's heads cannot be divided by, before it is built.

    Args:
        config: of the model.
        size: S, ranks that share the tokens of a forest; 1 always fits.

    Raises:
        ValueError: names the sizes that stand against it, the key and what fits.
    """
    reasons = _reasons(config, size)
    if reasons:
        fits = [str(other) for other in SIZES if not _reasons(config, other)]
        remedy = f"sizes of {SIZES} that fit: {', '.join(fits)}" if fits else f"set {KEY}=1"
        raise ValueError(f"{KEY}={size} does not fit model_type={config.model_type}: {'; '.join(reasons)}; {remedy}")


def _reasons(config: PretrainedConfig, size: int) -> list[str]:
    settings = config.get_text_config().to_dict()
    names = (*SPLIT, "hidden_size") if settings.get(CONVOLUTION) is not None else SPLIT
    counts = {name: count for name in (*names, *SHARED) if isinstance(count := settings.get(name), int)}
    reasons = [f"{name}={counts[name]} is no multiple of it" for name in names if counts.get(name, 0) % size]
    for name in SHARED:
        count = counts.get(name, size)
        if count % size and size % count:
            reasons.append(f"{name}={count} is neither a multiple of it nor divides it")
    return reasons
