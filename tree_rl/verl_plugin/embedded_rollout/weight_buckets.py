"""Packs weights into buckets in the format of safetensors, which cannot run code when it is read.

Ray passes a bucket from trainer to rollout server as a NumPy array, through shared memory.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors


def pack(weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[np.ndarray]:
    """Group (name, tensor) pairs into buckets of about `bucket_bytes`, uint8, each with at least one weight."""
    bucket: dict[str, torch.Tensor] = {}
    filled = 0
    for name, tensor in weights:
        # A copy, because the format has no tensors that share memory, as tied weights do.
        copied = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        if bucket and filled + copied.nbytes > bucket_bytes:
            yield np.frombuffer(safetensors.save(bucket), dtype=np.uint8)
            bucket, filled = {}, 0
        bucket[name] = copied
        filled += copied.nbytes
    if bucket:
        yield np.frombuffer(safetensors.save(bucket), dtype=np.uint8)


def unpack(bucket: np.ndarray) -> dict[str, torch.Tensor]:
    """The weights in a bucket by name; raises a ValueError for other bytes."""
    try:
        return safetensors.load(bucket.tobytes())
    except SafetensorError as error:
        raise ValueError(
            f"weights from the trainer: expected a bucket of safetensors, received {bucket[:60].tobytes()!r} "
            f"({error}); do trainer and rollout run the same version of tree_rl?"
        ) from error


@torch.no_grad()
def load(model: torch.nn.Module, bucket: np.ndarray) -> None:
    """Copy weights into a model of the same architecture, converted to its dtype.

    Raises a KeyError for a parameter that the model lacks, and a ValueError for another shape.
    """
    targets = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name, weight in unpack(bucket).items():
        target = targets.get(name, _slice_of_experts(name, targets))
        if target is None:
            raise KeyError(
                f"weight {name!r} from the trainer: the rollout model has no such parameter, expected names "
                f"like {next(iter(targets))!r}. LoRA adapters must be merged: actor_rollout_ref.model.lora.merge=True"
            )
        if target.shape != weight.shape:
            raise ValueError(
                f"weight {name!r}: expected shape {tuple(target.shape)} of the rollout model, received "
                f"{tuple(weight.shape)}; do actor and rollout name the same model.path?"
            )
        target.copy_(weight)


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
