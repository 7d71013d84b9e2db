"""Compiles the kernels of the delta rule for the heads of Qwen3.5: python -m compile_delta_kernels 90 bfloat16.

Prints the shared memory of each, in bytes, at state size 128 x 128 or the one given last.
"""

import json
import sys
from typing import Any

import torch
from compiled_kernels import SHARED_MEMORY, shared_memory

from tree_kernels.tree_gated_delta_rule.triton_kernels import (
    gradient_kernels,
    key_gradient_kernels,
    output_kernel,
    prepare_kernels,
    state_kernels,
)
from tree_kernels.tree_gated_delta_rule.triton_kernels.sizes import TILE_TOKENS, Launch, Launches, launches_for

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FLOATS = (
    "g", "beta", "slot", "path", "from_entry", "to_exit", "kept", "d_source", "d_joint", "d_path", "d_beta", "d_g",
)  # fmt: skip
INTEGERS = (
    "token", "row_end", "main_row", "stored_slot", "chain_start", "chain_slot", "side_start", "side_tile", "side_row",
    "side_slot", "entry_slot", "joint", "joint_tile", "joint_slot", "source_start", "source",
)  # fmt: skip


def kernels_of(launches: Launches) -> dict[str, tuple[Any, Launch]]:
    """Every kernel that has a launch, by name."""
    return {
        "prepare": (prepare_kernels.prepare_kernel, launches.prepare),
        "products": (prepare_kernels.products_kernel, launches.products),
        "walk": (state_kernels.walk_kernel, launches.walk),
        "walk_of_few": (state_kernels.walk_kernel, launches.walk_of_few),
        "side_states": (state_kernels.side_states_kernel, launches.side_states),
        "output": (output_kernel.output_kernel, launches.output),
        "score_gradients": (gradient_kernels.score_gradients_kernel, launches.score_gradients),
        "joint_gradients": (state_kernels.joint_gradients_kernel, launches.joint_gradients),
        "walk_back": (state_kernels.walk_back_kernel, launches.walk_back),
        "walk_back_of_few": (state_kernels.walk_back_kernel, launches.walk_back_of_few),
        "query_gradients": (gradient_kernels.query_gradients_kernel, launches.query_gradients),
        "inverse_gradients": (key_gradient_kernels.inverse_gradients_kernel, launches.inverse_gradients),
        "exit_gradients": (key_gradient_kernels.exit_gradients_kernel, launches.exit_gradients),
        "key_gradients": (key_gradient_kernels.key_gradients_kernel, launches.key_gradients),
    }


def shared_memory_of(kernel: Any, launch: Launch, dtype: torch.dtype, capability: int, sizes: dict[str, Any]) -> int:
    sizes = sizes | {"BK": launch.keys, "BV": launch.values}
    sizes = {name: value for name, value in sizes.items() if name in kernel.arg_names}
    types = {}
    for name in kernel.arg_names:
        named = name.removesuffix("_pointer")
        if name in sizes:
            types[name] = "constexpr"
        elif name.endswith("_pointer"):
            types[name] = "*fp32" if named in FLOATS else "*i32" if named in INTEGERS else f"*{SHORT[dtype]}"
        else:
            types[name] = "fp32" if name == "scale" else "i32"
    return shared_memory(kernel, types, sizes, capability, warps=launch.warps, stages=launch.stages)


def main(capability: int, dtype: torch.dtype, size: int = 128) -> None:
    launches = launches_for(dtype, size, size, SHARED_MEMORY[capability])
    constants = {"HEADS": 32, "GROUP": 2, "K": size, "V": size, "C": TILE_TOKENS, "SIDES": True, "CORRECTS": True}
    constants["R"] = launches.inverse_block_rows
    shared = {
        name: shared_memory_of(kernel, launch, dtype, capability, constants)
        for name, (kernel, launch) in kernels_of(launches).items()
    }
    print(json.dumps(shared))


if __name__ == "__main__":
    main(int(sys.argv[1]), getattr(torch, sys.argv[2]), *map(int, sys.argv[3:]))
