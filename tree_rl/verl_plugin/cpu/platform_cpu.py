"""A verl platform for machines without an accelerator, found by verl's own detection after all others.

verl names the process group backend `cpu:gloo,<device>:<backend>`, which on a CPU reads `cpu:gloo,cpu:gloo`: a device
named twice, refused by torch. The platform registers gloo under exactly that name, through torch's extension point.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry

from tree_rl.verl_plugin.cpu import cpu_device

PLATFORM_NAME = "cpu"
DOUBLED_GLOO = "cpu:gloo,cpu:gloo"


class PlatformCPU(PlatformBase):
    """verl's device interface on the CPU; collectives run on gloo.

    verl picks it by itself when torch is built without an accelerator. With a CUDA or ROCm build, the absence of a
    device also describes the head node of a GPU cluster, so there it must be asked for: `VERL_PLATFORM=cpu`.
    """

    def __init__(self) -> None:
        register_doubled_gloo()

    @property
    def device_name(self) -> str:
        """Return the torch device type."""
        return "cpu"

    @property
    def vendor_name(self) -> str:
        """Return the vendor verl's engine registry looks up."""
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        """Return the stand-in for `torch.cuda`."""
        return cpu_device

    def is_available(self) -> bool:
        """Return True: the platform works wherever it is asked for."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return whether verl's detection should settle on the CPU."""
        return not torch_has_accelerator()

    def current_device(self) -> torch.device:
        """Return the CPU device, not an index: verl passes it to `tensor.to`."""
        return cpu_device.current_device()

    def device_count(self) -> int:
        """Return 1."""
        return cpu_device.device_count()

    def set_device(self, device_index: int) -> None:
        """Do nothing."""
        cpu_device.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing."""
        cpu_device.synchronize(device_index)

    def manual_seed(self, seed: int) -> None:
        """Seed the CPU generator."""
        cpu_device.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the CPU generator."""
        cpu_device.manual_seed_all(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing."""

    def empty_cache(self) -> None:
        """Do nothing."""
        cpu_device.empty_cache()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """Return no compute capability."""
        return cpu_device.get_device_capability(device_index)

    def communication_backend_name(self) -> str:
        """Return gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return the variable in which Ray lists logical GPUs."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Mark nothing."""
        yield

    def profiler_start(self) -> None:
        """Do nothing."""

    def profiler_stop(self) -> None:
        """Do nothing."""

    def ray_resource_name(self) -> str:
        """Return "GPU": verl's placement groups count GPUs; a CPU run declares logical ones (`ray_init.num_gpus`)."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return none."""
        return []

    def is_ipc_supported(self) -> bool:
        """Return False: weights travel through shared memory."""
        return False

    def cudart(self) -> Any:
        """Return None."""


def torch_has_accelerator() -> bool:
    """Return whether this torch build can drive an accelerator (CUDA, ROCm, NPU or XPU), present or not."""
    built_for_gpu = torch.version.cuda is not None or torch.version.hip is not None
    return built_for_gpu or torch.accelerator.is_available()


def register_doubled_gloo() -> None:
    """Make `init_process_group("cpu:gloo,cpu:gloo")` mean gloo on the CPU. Idempotent."""
    if DOUBLED_GLOO in torch.distributed.Backend.backend_list:
        return

    def create(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
        return torch.distributed.ProcessGroupGloo(store, rank, world_size, timeout)

    torch.distributed.Backend.register_backend(DOUBLED_GLOO, create, devices=["cpu"])


def register_cpu_platform() -> None:
    """Add the platform "cpu" to verl's registry, behind verl's own platforms."""
    PlatformRegistry.register(platform=PLATFORM_NAME)(PlatformCPU)
