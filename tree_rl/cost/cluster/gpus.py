"""Memory, training throughput and link speed of GPUs: measured for the H200, scaled by data sheets for the others."""

from dataclasses import dataclass
from enum import StrEnum

from tree_rl.cost.cluster.hardware import Cluster
from tree_rl.cost.memory.model import GIB

MEASURED_PEAK, MEASURED_NVLINK = 989, 900
"""The measured H200's data sheet: dense bf16 TFLOP/s, and NVLink in GB/s, both directions together."""


class Gpu(StrEnum):
    """GPUs with known specifications."""

    H200 = "h200"
    H100 = "h100"
    H20 = "h20"
    A100 = "a100"
    B200 = "b200"
    L40S = "l40s"

    @property
    def spec(self) -> "GpuSpec":
        """Specifications of the GPU."""
        return SPECS[self]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """Specifications of one GPU."""

    memory_gib: float
    """Memory in GiB, as CUDA reports it."""
    peak_tflops: float
    """Dense bf16 TFLOP/s from the data sheet."""
    link_gb: float
    """GB/s to other GPUs of the node, both directions together, from the data sheet: NVLink, or PCIe for L40S."""

    def cluster(self, gpus: int) -> Cluster:
        """A cluster of this many GPUs in nodes of 8, at the shares of peak and link that the H200 reaches."""
        flops, link = Cluster.flops * self.peak_tflops / MEASURED_PEAK, Cluster.link * self.link_gb / MEASURED_NVLINK
        return Cluster(gpus=gpus, flops=flops, memory=self.memory_gib * GIB, link=link)


SPECS = {
    Gpu.H200: GpuSpec(memory_gib=139, peak_tflops=MEASURED_PEAK, link_gb=MEASURED_NVLINK),
    Gpu.H100: GpuSpec(memory_gib=79, peak_tflops=989, link_gb=900),
    Gpu.H20: GpuSpec(memory_gib=95, peak_tflops=148, link_gb=900),
    Gpu.A100: GpuSpec(memory_gib=79, peak_tflops=312, link_gb=600),
    Gpu.B200: GpuSpec(memory_gib=178, peak_tflops=2250, link_gb=1800),
    Gpu.L40S: GpuSpec(memory_gib=44, peak_tflops=362, link_gb=64),
}
