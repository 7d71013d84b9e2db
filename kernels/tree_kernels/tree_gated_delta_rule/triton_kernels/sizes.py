"""Supported state sizes and launch options of the Triton kernels. This file does not import Triton."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from tree_kernels import triton_support

TILE_TOKENS = 64
SIZES = (16, 32, 64, 128, 256)
ON_CPU = 2
"""Parallel programs in the interpreter, where it only decides which launch a test runs."""
KIBI = 1024
HOPPERS_SHARED_MEMORY = frozenset({(9, 0), (10, 0)})
"""Compute capabilities with 227 KiB of shared memory per program; all other supported ones have at least 99 KiB."""
PROVEN_SIZES = frozenset({(64, 64), (128, 128)})
"""State sizes (keys, values) for which compiled kernels were compared with float64 on a GPU; see kernels/README.md."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Block sizes and launch options of one kernel."""

    keys: int
    """Columns of keys per block."""
    values: int
    """Columns of values per block."""
    warps: int
    """Warps per program."""
    stages: int
    """Depth of the load pipeline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launches:
    """Options of all kernels."""

    prepare: Launch
    products: Launch
    walk: Launch
    walk_of_few: Launch
    """Walk of a level whose programs all run in parallel, so that the speed of a single program counts."""
    side_states: Launch
    output: Launch
    score_gradients: Launch
    joint_gradients: Launch
    walk_back: Launch
    walk_back_of_few: Launch
    query_gradients: Launch
    inverse_gradients: Launch
    exit_gradients: Launch
    key_gradients: Launch
    inverse_block_rows: int | None
    """Rows of the blocks that `prepare` solves in parallel and joins with tf32 products; None: row by row, float32."""


def triton_unavailable_reason(device: torch.device, dtype: torch.dtype, key_size: int, value_size: int) -> str | None:
    """Why the Triton kernels cannot run at these state sizes, or None if they can."""
    reason = triton_support.triton_unavailable_reason(device, dtype)
    if reason is None and (key_size not in SIZES or value_size not in SIZES):
        return f"the Triton kernels need state sizes in {SIZES}, received {key_size} x {value_size}"
    return reason


def triton_or_chunked(
    device: torch.device, dtype: torch.dtype, key_size: int, value_size: int, *, proven: frozenset[tuple[int, int]]
) -> str:
    """What `impl="auto"` runs: triton on CUDA in half precision at proven sizes, else chunked."""
    # Not in float32: its exact products are unrolled, so that the first call at 128 x 128 would compile for minutes.
    is_half = dtype in (torch.bfloat16, torch.float16)
    is_proven = device.type == "cuda" and is_half and (key_size, value_size) in proven
    return "triton" if is_proven and not triton_unavailable_reason(device, dtype, key_size, value_size) else "chunked"


AT_128 = Launches(
    prepare=Launch(keys=64, values=64, warps=2, stages=1),
    products=Launch(keys=128, values=128, warps=8, stages=2),
    walk=Launch(keys=64, values=64, warps=4, stages=3),
    walk_of_few=Launch(keys=64, values=32, warps=4, stages=5),
    side_states=Launch(keys=64, values=32, warps=2, stages=3),
    output=Launch(keys=64, values=128, warps=4, stages=2),
    score_gradients=Launch(keys=128, values=64, warps=4, stages=3),
    joint_gradients=Launch(keys=64, values=32, warps=2, stages=2),
    walk_back=Launch(keys=64, values=64, warps=4, stages=5),
    walk_back_of_few=Launch(keys=64, values=32, warps=4, stages=5),
    query_gradients=Launch(keys=64, values=64, warps=4, stages=3),
    inverse_gradients=Launch(keys=64, values=64, warps=4, stages=3),
    exit_gradients=Launch(keys=64, values=64, warps=4, stages=3),
    key_gradients=Launch(keys=128, values=64, warps=4, stages=1),
    inverse_block_rows=8,
)
"""Fastest options for bfloat16 at 128 x 128 on an H200 (docs/log.md); at most 202 KiB of shared memory."""
OF_STATES = ("walk", "walk_of_few", "side_states", "joint_gradients", "walk_back", "walk_back_of_few")
"""Kernels that hold blocks of states with all keys."""
SHALLOW_WALK_BACK = Launch(keys=64, values=32, warps=4, stages=2)


def processors_of(device: torch.device) -> int:
    """Number of programs of a walk that run in parallel."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else ON_CPU


def shared_memory_of(device: torch.device) -> int:
    """Lower bound on the bytes of shared memory of a program."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) not in HOPPERS_SHARED_MEMORY:
        return 99 * KIBI
    return 227 * KIBI


def launches_for(dtype: torch.dtype, key_size: int, value_size: int, shared_memory: int = 227 * KIBI) -> Launches:
    """Options by dtype and state size: measured at 128 x 128 in half precision, else only known to fit."""
    if dtype != torch.float32 and (key_size, value_size) == (128, 128):
        launches = AT_128
        if shared_memory < 227 * KIBI:
            shallow = SHALLOW_WALK_BACK
            launches = replace(AT_128, walk_of_few=AT_128.walk, walk_back=shallow, walk_back_of_few=shallow)
        if dtype == torch.bfloat16:
            return launches
        # tf32 truncates operands to float16's precision, which would be visible in the gradients of gates.
        return replace(launches, prepare=Launch(keys=128, values=64, warps=1, stages=1), inverse_block_rows=None)
    widest = 32 if dtype == torch.float32 else 64
    keys, values = min(widest, key_size), min(widest, value_size)
    usual = Launch(keys=keys, values=values, warps=4, stages=2)
    narrow = min(32 if key_size <= 128 and dtype != torch.float32 else 16, value_size)
    of_states = replace(usual, values=narrow)
    fitting: dict[str, Any] = dict.fromkeys(Launches.__slots__, usual) | dict.fromkeys(OF_STATES, of_states)
    return Launches(**fitting | {"inverse_block_rows": None})
