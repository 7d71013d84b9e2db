"""GPUs and what connects them: how long a collective takes, how fast a model's operations run."""

from dataclasses import dataclass

from tree_rl.cost.memory.model import GIB

OPTIMIZER_RATE = 5e10
"""Parameters of which one H200 clips the gradient and does AdamW in a second. verl takes torch's default, a kernel for
each term: about 80 bytes a parameter. Measured with all else that a step does to parameters, 0.02 s for every 1e9
(docs/benchmarks/cost_error.csv, whole_model_1gpu.csv)."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    gpus: int
    """GPUs of all nodes together."""
    gpus_per_node: int = 8
    flops: float = 450e12
    """Operations that a GPU runs in a second, by the cost model's count; the default is an H200's with Qwen3-8B
    (docs/scale.md)."""
    memory: float = 139 * GIB
    """Bytes of one GPU."""
    link: float = 269e9
    """Bytes a second that a GPU receives from the others of its node (docs/benchmarks/collectives.csv, all-gather)."""
    network: float = 50e9
    """Bytes a second that a GPU's network card receives from other nodes: an input, 400 Gbit/s by default."""
    latency: float = 57e-6
    """Seconds of a collective, however small (collectives.csv), and of each further node it crosses (assumed)."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"Cluster.{name}: expected a positive number, received {getattr(self, name)}")

    @classmethod
    def of(cls, gpus: int, gpus_per_node: int, *, tflops: float, network: float, memory: float) -> "Cluster":
        """In the units of a command line: TFLOP/s, GB/s and GiB of one GPU."""
        rates = {"flops": tflops * 1e12, "network": network * 1e9, "memory": memory * GIB}
        return cls(gpus=gpus, gpus_per_node=gpus_per_node, **rates)

    def bandwidth(self, ranks: int) -> float:
        """Bytes a second of a gather or scatter among neighbours: the slowest link on its way decides.

        What a node needs from the others enters it once, spread over the network cards of all its GPUs.
        """
        return self.link if ranks <= self.gpus_per_node else min(self.link, self.network * self.gpus_per_node)

    def collective(self, size: float, ranks: int) -> float:
        """Seconds of an all-gather, a reduce-scatter or an all-to-all among neighbouring ranks.

        Args:
            size: bytes of the whole tensor, all ranks' shares together; in an all-to-all, what one rank holds.
            ranks: that take part; one alone sends nothing.
        """
        if ranks == 1:
            return 0.0
        nodes = -(-ranks // self.gpus_per_node)
        return self.latency * nodes + size * (ranks - 1) / ranks / self.bandwidth(ranks)
