"""What a forest's run does to need less GPU memory."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySaving:
    """Chosen per micro-batch by the memory model; the default keeps everything on the device."""

    offloaded_layers: int = 0
    """Decoder layers, from the first on, whose checkpointed input waits for the backward in host memory."""
    tile_tokens: int | None = None
    """Tokens of one tile of each layer's MLP; None runs the MLP over all tokens at once."""
    relays_on_host: bool = False
    """Keys, values and states that wait for child partitions lie in host memory."""
