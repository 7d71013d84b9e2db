"""Compiles the kernels of tree attention in bfloat16 with every option: python -m compile_triton_kernels 90 192 128.

The numbers are the capability and the head sizes of keys and values. Prints the shared memory of each, in bytes.
"""

import json
import sys
from typing import Any

import torch
from compiled_kernels import shared_memory

from tree_kernels.tree_attention.triton_kernels import sizes
from tree_kernels.tree_attention.triton_kernels.forward_kernel import forward_kernel
from tree_kernels.tree_attention.triton_kernels.key_gradient_kernels import key_gradient_kernel
from tree_kernels.tree_attention.triton_kernels.query_gradient_kernels import query_gradient_kernel, row_term_kernel
from tree_kernels.tree_attention.triton_kernels.sizes import Tile, padded_size, tiles_for

GROUP = 4
INTEGER_VECTORS = ("full_", "partial_", "key_", "piece_block", "piece_first", "piece_stop", "piece_slot")
FLOAT_VECTORS = ("lse_", "row_term_", "grad_lse_", "piece_sum")


def shared_memory_of(kernel: Any, tile: Tile, capability: int, constants: dict[str, Any]) -> int:
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name.endswith("_blocks"):
            rows = constants["KEYS" if name in ("k_blocks", "v_blocks") else "ROWS"]
            size = constants["PADDED_VALUE_SIZE" if name in ("v_blocks", "grad_blocks") else "PADDED_SIZE"]
            types[name] = f"tensordesc<bf16[{rows}, 1, {size}]>"
        elif name.endswith("_pointer"):
            types[name] = "*i32" if name.startswith(INTEGER_VECTORS) else "*bf16"
            types[name] = "*fp32" if name.startswith(FLOAT_VECTORS) else types[name]
        else:
            types[name] = "fp32" if name in ("scale", "scale_log2", "cap_log2") else "i32"
    return shared_memory(kernel, types, constants, capability, warps=tile.warps, stages=tile.stages)


def main(capability: int, head_size: int, value_size: int) -> None:
    sizes.measured_on = lambda device: capability == 90
    tiles = tiles_for(max(head_size, value_size), torch.bfloat16, torch.device("cuda"))
    head = {"HEAD_SIZE": head_size, "PADDED_SIZE": padded_size(head_size)}
    value = {"VALUE_SIZE": value_size, "PADDED_VALUE_SIZE": padded_size(value_size)}
    of_outputs = {"HEAD_SIZE": value_size, "PADDED_SIZE": padded_size(value_size)}
    sums = {"SUM_SIZE": max(padded_size(head_size), padded_size(value_size))}

    def constants(tile: Tile) -> dict[str, Any]:
        options = {"CAPPED": True, "WINDOWED": True, "PRECISION": tile.precision, "IN_REGISTERS": tile.in_registers}
        return {"GROUP": GROUP, "ROWS": tile.rows, "KEYS": tile.keys} | options | head | value

    def packed(tile: Tile) -> dict[str, Any]:
        pack = GROUP if tile.packed else 1
        return constants(tile) | {"PACK": pack, "TOKENS": tile.rows // pack}

    forward, queries = tiles.forward, tiles.query_gradient
    shared = {
        "forward": shared_memory_of(forward_kernel, forward, capability, packed(forward) | {"SINKS": True}),
        "query_gradient": shared_memory_of(query_gradient_kernel, queries, capability, packed(queries)),
        "row_term": shared_memory_of(
            row_term_kernel,
            Tile(rows=64, keys=0, warps=4, stages=3),
            capability,
            {"ROWS": 64, "LSE_GRADIENT": True} | of_outputs,
        ),
    }
    together = len(tiles.key_gradients) == 1
    for index, tile in enumerate(tiles.key_gradients):
        of = {"OF_KEYS": index == 0, "OF_VALUES": together or index == 1}
        shared[f"key_gradient {index}"] = shared_memory_of(
            key_gradient_kernel, tile, capability, constants(tile) | of | sums
        )
    print(json.dumps(shared))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
