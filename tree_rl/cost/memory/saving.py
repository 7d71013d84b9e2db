"""Settings that reduce a forest's GPU memory."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySaving:
    """Chosen per micro-batch by the memory model; the default keeps everything on the device."""

    offloaded_layers: int = 0
    """Number of decoder layers, from the first, whose checkpointed inputs are kept in host memory."""
    tile_tokens: int | None = None
    """Tokens per tile of each layer's MLP; None runs the MLP over all tokens at once."""
    relays_on_host: bool = False
    """True keeps the keys, values and states for child partitions in host memory."""
