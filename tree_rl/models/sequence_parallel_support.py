"""Which sizes of sequence parallelism (Ulysses) a model's heads allow."""

from transformers import PretrainedConfig

KEY = "ulysses_sequence_parallel_size"
SIZES = (2, 4, 8)
"""Offered in place of a size that does not fit."""
SPLIT = ("num_attention_heads", "linear_num_value_heads", "mamba_n_heads")
"""Heads that ranks share out. Those that several of them read (keys, values, groups) are repeated where need be."""
CONVOLUTION = "conv_L_cache"
"""Where a config has it, ranks share out the channels of short convolutions: the hidden size."""


def check_sequence_parallel(config: PretrainedConfig, size: int) -> None:
    """Refuse a size by which a model's heads cannot be divided, before the model is built.

    Args:
        config: of the model.
        size: S, ranks that share the tokens of a forest; 1 always fits.

    Raises:
        ValueError: names what the size does not divide, the key and the sizes that fit.
    """
    reasons = _reasons(config, size)
    if reasons:
        fits = [str(other) for other in SIZES if not _reasons(config, other)]
        remedy = f"set {KEY} to 1" + "".join(f" or {other}" for other in fits)
        raise ValueError(f"{KEY}={size} does not divide {', '.join(reasons)} of {config.model_type}; {remedy}")


def _reasons(config: PretrainedConfig, size: int) -> list[str]:
    settings = config.get_text_config().to_dict()
    names = SPLIT if settings.get(CONVOLUTION) is None else (*SPLIT, "hidden_size")
    counts = {name: count for name in names if isinstance(count := settings.get(name), int)}
    return [f"{name}={count}" for name, count in counts.items() if count % size]
