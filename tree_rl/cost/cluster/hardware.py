"""GPUs and their links: how long a collective takes, how fast operations run."""

from dataclasses import dataclass

from tree_rl.cost.memory.model import GIB

OPTIMIZER_RATE = 5e10
"""Parameters per second for gradient clipping and AdamW on an H200, with all else that a step does to parameters
(measured: docs/benchmarks/cost_error.csv, whole_model_1gpu.csv). verl uses torch's default AdamW, which runs one
kernel per term and moves about 80 bytes per parameter."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Identical nodes of identical GPUs."""

    gpus: int
    """Total number of GPUs."""
    gpus_per_node: int = 8
    flops: float = 450e12
    """Operations per second of a GPU, as the cost model counts them; default: H200 with Qwen3-8B (docs/scale.md)."""
    memory: float = 139 * GIB
    """Bytes of memory per GPU."""
    link: float = 269e9
    """Bytes per second that a GPU receives from its node (docs/benchmarks/collectives.csv, all-gather)."""
    network: float = 50e9
    """Bytes per second that a GPU's network card receives from other nodes; default: 400 Gbit/s."""
    latency: float = 57e-6
    """Seconds that any collective takes (collectives.csv), per node that it spans (assumed)."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"Cluster.{name}: expected a positive number, received {getattr(self, name)}")

    def bandwidth(self, ranks: int) -> float:
        """Bytes per second of a gather or scatter among neighbouring ranks; the slowest link decides.

        Data from other nodes enters a node once, spread over the network cards of all its GPUs.
        """
        return self.link if ranks <= self.gpus_per_node else min(self.link, self.network * self.gpus_per_node)

    def collective(self, size: float, ranks: int) -> float:
        """Seconds of an all-gather, reduce-scatter or all-to-all among neighbouring ranks.

        Args:
            size: bytes of the whole tensor over all ranks; for an all-to-all, bytes on one rank.
            ranks: number of ranks; with 1 nothing is sent.
        """
        if ranks == 1:
            return 0.0
        nodes = -(-ranks // self.gpus_per_node)
        return self.latency * nodes + size * (ranks - 1) / ranks / self.bandwidth(ranks)
