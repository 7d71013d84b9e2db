"""Compiles kernels on a machine without a GPU: python -m compile_kernels CAPABILITY delta DTYPE, or
CAPABILITY attention and the head sizes of keys and of values. Prints the names of those that fit shared memory.

The delta rule has the heads of Qwen3.5, tree attention bfloat16 and every option. The interpreter must be off.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tree_kernels.tree_attention.triton_kernels import sizes
from tree_kernels.tree_attention.triton_kernels.forward_kernel import forward_kernel
from tree_kernels.tree_attention.triton_kernels.key_gradient_kernels import key_gradient_kernel
from tree_kernels.tree_attention.triton_kernels.query_gradient_kernels import query_gradient_kernel, row_term_kernel
from tree_kernels.tree_attention.triton_kernels.sizes import Tile, padded_size, tiles_for
from tree_kernels.tree_gated_delta_rule.triton_kernels import (
    gradient_kernels,
    key_gradient_kernels,
    output_kernel,
    prepare_kernels,
    state_kernels,
)
from tree_kernels.tree_gated_delta_rule.triton_kernels.sizes import TILE_TOKENS, Launch, launches_for

KIBI = 1024
SHARED_MEMORY = {90: 227 * KIBI, 80: 99 * KIBI}
"""By compute capability; 99 KiB: Ada and the smaller Ampere."""
SHORT = {"bfloat16": "bf16", "float16": "fp16"}
DELTA_FLOATS = (
    "g", "beta", "slot", "path", "from_entry", "to_exit", "kept", "d_source", "d_joint", "d_path", "d_beta", "d_g",
)  # fmt: skip
DELTA_INTEGERS = (
    "token", "row_end", "main_row", "stored_slot", "chain_start", "chain_slot", "side_start", "side_tile", "side_row",
    "side_slot", "entry_slot", "joint", "joint_tile", "joint_slot", "source_start", "source",
)  # fmt: skip
GROUP = 4
INTEGER_VECTORS = ("full_", "partial_", "key_", "piece_block", "piece_first", "piece_stop", "piece_slot")
FLOAT_VECTORS = ("lse_", "row_term_", "grad_lse_", "piece_sum")


def shared_memory(
    kernel: Any, type_of: Callable[[str], str], constants: dict[str, Any], capability: int, launch: Tile | Launch
) -> int:
    """Bytes that one compiled kernel takes; its pointers are multiples of 16."""
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {name: "constexpr" if name in constants else type_of(name) for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name.endswith("_pointer") and name not in constants
    }
    source = ASTSource(kernel, types, constants, aligned)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared


def delta_rule(capability: int, dtype: str) -> dict[str, int]:
    size = 128
    launches = launches_for(getattr(torch, dtype), size, size, SHARED_MEMORY[capability])
    constants = {"HEADS": 32, "GROUP": 2, "K": size, "V": size, "C": TILE_TOKENS, "SIDES": True, "CORRECTS": True}
    constants["R"] = launches.inverse_block_rows

    def type_of(name: str) -> str:
        if not name.endswith("_pointer"):
            return "fp32" if name == "scale" else "i32"
        named = name.removesuffix("_pointer")
        return "*fp32" if named in DELTA_FLOATS else "*i32" if named in DELTA_INTEGERS else f"*{SHORT[dtype]}"

    kernels = {
        prepare_kernels: ("prepare", "products"),
        state_kernels: ("walk", "side_states", "joint_gradients", "walk_back"),
        output_kernel: ("output",),
        gradient_kernels: ("score_gradients", "query_gradients"),
        key_gradient_kernels: ("inverse_gradients", "exit_gradients", "key_gradients"),
    }
    named = {name: getattr(module, f"{name}_kernel") for module, names in kernels.items() for name in names}
    named |= {f"{name}_of_few": named[name] for name in ("walk", "walk_back")}
    return {
        name: shared_memory(kernel, type_of, constants | {"BK": launch.keys, "BV": launch.values}, capability, launch)
        for name, kernel in named.items()
        for launch in (getattr(launches, name),)
    }


def attention(capability: int, head_size: int, value_size: int) -> dict[str, int]:
    sizes.measured_on = lambda device: capability == 90
    tiles = tiles_for(max(head_size, value_size), torch.bfloat16, torch.device("cuda"))
    head = {"HEAD_SIZE": head_size, "PADDED_SIZE": padded_size(head_size)}
    value = {"VALUE_SIZE": value_size, "PADDED_VALUE_SIZE": padded_size(value_size)}
    of_outputs = {"HEAD_SIZE": value_size, "PADDED_SIZE": padded_size(value_size)}
    sums = {"SUM_SIZE": max(padded_size(head_size), padded_size(value_size))}

    def constants(tile: Tile) -> dict[str, Any]:
        options = {"CAPPED": True, "WINDOWED": True, "PRECISION": tile.precision, "IN_REGISTERS": tile.in_registers}
        pack = GROUP if tile.packed else 1
        shape = {"GROUP": GROUP, "ROWS": tile.rows, "KEYS": tile.keys, "PACK": pack, "TOKENS": tile.rows // pack}
        return shape | options | head | value

    def compiled(kernel: Any, tile: Tile, given: dict[str, Any]) -> int:
        def type_of(name: str) -> str:
            if name.endswith("_blocks"):
                rows = given["KEYS" if name in ("k_blocks", "v_blocks") else "ROWS"]
                width = given["PADDED_VALUE_SIZE" if name in ("v_blocks", "grad_blocks") else "PADDED_SIZE"]
                return f"tensordesc<bf16[{rows}, 1, {width}]>"
            if not name.endswith("_pointer"):
                return "fp32" if name in ("scale", "scale_log2", "cap_log2") else "i32"
            if name.startswith(FLOAT_VECTORS):
                return "*fp32"
            return "*i32" if name.startswith(INTEGER_VECTORS) else "*bf16"

        return shared_memory(kernel, type_of, given, capability, tile)

    forward, queries = tiles.forward, tiles.query_gradient
    terms = Tile(rows=64, keys=0, warps=4, stages=3)
    shared = {
        "forward": compiled(forward_kernel, forward, constants(forward) | {"SINKS": True}),
        "query_gradient": compiled(query_gradient_kernel, queries, constants(queries)),
        "row_term": compiled(row_term_kernel, terms, {"ROWS": 64, "LSE_GRADIENT": True} | of_outputs),
    }
    together = len(tiles.key_gradients) == 1
    for index, tile in enumerate(tiles.key_gradients):
        of = {"OF_KEYS": index == 0, "OF_VALUES": together or index == 1}
        shared[f"key_gradient {index}"] = compiled(key_gradient_kernel, tile, constants(tile) | of | sums)
    return shared


if __name__ == "__main__":
    target, operation, *arguments = sys.argv[1:]
    delta = operation == "delta"
    shared = delta_rule(int(target), *arguments) if delta else attention(int(target), *map(int, arguments))
    assert all(0 <= used <= SHARED_MEMORY[int(target)] for used in shared.values()), shared
    print(json.dumps(list(shared)))
