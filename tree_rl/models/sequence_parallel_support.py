"""Which sizes of Ulysses sequence parallelism a model's heads allow."""

from transformers import PretrainedConfig

KEY = "ulysses_sequence_parallel_size"
SIZES = (2, 4, 8)
"""Sizes that the error message may suggest."""
SPLIT = ("num_attention_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
"""Config keys of heads that are divided among ranks. Key-value heads and groups are repeated if there are too few."""
CONVOLUTION = "conv_L_cache"
"""Config key of models with short convolutions, whose channels (the hidden size) are divided among ranks."""


def check_sequence_parallel(config: PretrainedConfig, size: int) -> None:
    """Check, before the model is built, that its heads can be divided among `size` ranks.

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
