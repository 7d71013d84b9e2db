"""Lets verl hand a CPU's tensors to SGLang; verl's workers import it as `model.external_lib`. Only for these tests.

SGLang's own hand-over names the CUDA device of every tensor by its UUID, whatever device the tensor is on. Tensors of a
CPU go as torch sends them between processes here: by the name of a piece of shared memory.
"""

from typing import Any

import torch
from sglang.srt.utils import patch_torch
from torch.multiprocessing import reductions, set_sharing_strategy

reduce_device_tensor = patch_torch._reduce_tensor_modified


def reduce_tensor(tensor: torch.Tensor) -> Any:
    """What pickles a tensor for another process."""
    if tensor.device.type == "cpu":
        return reductions._reduce_tensor_original(tensor)
    return reduce_device_tensor(tensor)


patch_torch._reduce_tensor_modified = reduce_tensor
set_sharing_strategy("file_system")  # the other one passes descriptors, among children of one process alone
