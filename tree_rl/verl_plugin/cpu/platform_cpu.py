"""A verl platform for machines without an accelerator; verl's detection tries it after all others.

verl's process group backend is `cpu:gloo,<device>:<backend>`: on a CPU `cpu:gloo,cpu:gloo`, which torch refuses because
it names a device twice. So the platform registers gloo under that name.
"""

from contextlib import nullcontext

import torch
import torch.distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry

from tree_rl.verl_plugin.cpu import cpu_device

DOUBLED_GLOO = "cpu:gloo,cpu:gloo"


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """verl's device interface on the CPU; collectives use gloo.

    verl chooses it automatically if torch is built without an accelerator. A CUDA or ROCm build needs
    `VERL_PLATFORM=cpu`, because the head node of a GPU cluster has no device either.
    """

    device_name = vendor_name = "cpu"
    device_module = cpu_device
    current_device = staticmethod(cpu_device.current_device)
    device_count = staticmethod(cpu_device.device_count)
    manual_seed = manual_seed_all = staticmethod(cpu_device.manual_seed)
    set_device = synchronize = empty_cache = set_allocator_settings = staticmethod(cpu_device.do_nothing)
    profiler_start = profiler_stop = cudart = staticmethod(cpu_device.do_nothing)

    def __init__(self) -> None:
        if DOUBLED_GLOO not in torch.distributed.Backend.backend_list:
            gloo = torch.distributed.ProcessGroupGloo
            torch.distributed.Backend.register_backend(DOUBLED_GLOO, gloo, devices=["cpu"])

    def is_available(self) -> bool:
        """Return True: the platform always works."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """True if verl's detection should choose the CPU."""
        return not torch_has_accelerator()

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return the variable in which Ray lists logical GPUs."""
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> nullcontext[None]:
        return nullcontext()

    def ray_resource_name(self) -> str:
        """Return "GPU": verl's placement groups count GPUs, which a CPU run declares (`ray_init.num_gpus`)."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        """Return False: weights are sent through shared memory."""
        return False


def torch_has_accelerator() -> bool:
    """True if this torch build supports an accelerator (CUDA, ROCm, NPU or XPU), present or not."""
    built_for_gpu = torch.version.cuda is not None or torch.version.hip is not None
    return built_for_gpu or torch.accelerator.is_available()
