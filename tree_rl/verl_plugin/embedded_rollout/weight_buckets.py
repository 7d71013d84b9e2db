"""Packs weights into buckets of NumPy arrays, which Ray passes from trainer to rollout server through shared memory.

NumPy has no bfloat16, so every tensor is sent as bytes with its dtype and shape.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTensor:
    """One named weight."""

    name: str
    """Parameter name in the Hugging Face model."""
    data: np.ndarray
    """Bytes of the tensor, uint8 [bytes]."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    def unpack(self) -> torch.Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        if self.data.size:
            tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(self.data.copy()))
        return tensor


def pack(weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[list[PackedTensor]]:
    """Group (name, tensor) pairs into buckets of about `bucket_bytes`, each with at least one weight."""
    bucket: list[PackedTensor] = []
    filled = 0
    for name, tensor in weights:
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        if bucket and filled + data.nbytes > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(PackedTensor(name=name, data=data, dtype=tensor.dtype, shape=tuple(tensor.shape)))
        filled += data.nbytes
    if bucket:
        yield bucket


@torch.no_grad()
def load(model: torch.nn.Module, bucket: Iterable[PackedTensor]) -> None:
    """Copy weights into a model of the same architecture, converted to its dtype.

    Raises a KeyError for a parameter that the model lacks, and a ValueError for another shape.
    """
    targets = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for packed in bucket:
        target = targets.get(packed.name, _slice_of_experts(packed.name, targets))
        if target is None:
            raise KeyError(
                f"weight {packed.name!r} from the trainer: the rollout model has no such parameter, expected names "
                f"like {next(iter(targets))!r}. LoRA adapters must be merged: actor_rollout_ref.model.lora.merge=True"
            )
        if tuple(target.shape) != packed.shape:
            raise ValueError(
                f"weight {packed.name!r}: expected shape {tuple(target.shape)} of the rollout model, received "
                f"{packed.shape}; do actor and rollout name the same model.path?"
            )
        target.copy_(packed.unpack())


EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<projection>gate|up|down)_proj\.weight")
"""A checkpoint's name of one expert's weight; transformers stores all experts in one tensor."""


def _slice_of_experts(name: str, targets: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The slice of the experts' tensor that a checkpoint's name denotes, or None."""
    match = EXPERT.fullmatch(name)
    if match is None:
        return None
    projection, number = match["projection"], int(match["number"])
    fused = targets.get(f"{match['experts']}.{'down' if projection == 'down' else 'gate_up'}_proj")
    if fused is None or number >= len(fused):
        return None
    if projection == "down":
        return fused[number]
    gate, up = fused[number].chunk(2, dim=0)
    return gate if projection == "gate" else up
