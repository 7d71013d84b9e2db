"""GPUs by name: memory, rate in training and link. The H200 is measured; the others follow from data sheets."""

from dataclasses import dataclass
from enum import StrEnum

from tree_rl.cost.cluster.hardware import Cluster
from tree_rl.cost.memory.model import GIB

MEASURED_PEAK, MEASURED_NVLINK = 989, 900
"""Data sheet of the H200 that was measured: dense bf16 TFLOP/s, and GB/s of NVLink in both directions."""


class Gpu(StrEnum):
    """GPUs that predictions know."""

    H200 = "h200"
    H100 = "h100"
    H20 = "h20"
    A100 = "a100"
    B200 = "b200"
    L40S = "l40s"

    @property
    def spec(self) -> "GpuSpec":
        """Its figures."""
        return SPECS[self]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """One GPU."""

    memory_gib: float
    """What CUDA reports."""
    peak_tflops: float
    """Dense bf16, from the data sheet."""
    link_gb: float
    """GB/s to the others of its node in both directions, from the data sheet: NVLink, PCIe for L40S."""

    @property
    def flops(self) -> float:
        """Operations a second in training: the share of the peak that the H200 reaches."""
        return Cluster.flops * self.peak_tflops / MEASURED_PEAK

    def cluster(self, gpus: int) -> Cluster:
        """So many of them, in nodes of 8."""
        link = Cluster.link * self.link_gb / MEASURED_NVLINK
        return Cluster(gpus=gpus, flops=self.flops, memory=self.memory_gib * GIB, link=link)


SPECS = {
    Gpu.H200: GpuSpec(memory_gib=139, peak_tflops=MEASURED_PEAK, link_gb=MEASURED_NVLINK),
    Gpu.H100: GpuSpec(memory_gib=79, peak_tflops=989, link_gb=900),
    Gpu.H20: GpuSpec(memory_gib=95, peak_tflops=148, link_gb=900),
    Gpu.A100: GpuSpec(memory_gib=79, peak_tflops=312, link_gb=600),
    Gpu.B200: GpuSpec(memory_gib=178, peak_tflops=2250, link_gb=1800),
    Gpu.L40S: GpuSpec(memory_gib=44, peak_tflops=362, link_gb=64),
}
