"""Launches the Triton kernels with their grids, lists, strides and constants.

Legend: N unique tokens, P past tokens, M = P + N keys, H query heads, K key heads, D head size of queries and keys, E
of values.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tree_kernels.tree_attention.block_lists import BlockLists, block_lists, key_depths, key_ends
from tree_kernels.tree_attention.score_rule import ScoreRule
from tree_kernels.tree_attention.triton_kernels.forward_kernel import forward_kernel
from tree_kernels.tree_attention.triton_kernels.key_gradient_kernels import key_gradient_kernel, sum_pieces_kernel
from tree_kernels.tree_attention.triton_kernels.key_pieces import key_pieces
from tree_kernels.tree_attention.triton_kernels.query_gradient_kernels import query_gradient_kernel, row_term_kernel
from tree_kernels.tree_attention.triton_kernels.sizes import Tile, padded_size
from tree_kernels.tree_layout import TreeLayout
from tree_kernels.triton_support import launch_device

LOG2_E = 1 / math.log(2)
ROW_MULTIPLE = 128
"""Per-row vectors are padded to a multiple of this, so that kernels can read whole tiles."""
ROW_TERM_ROWS = 64
SUM_ROWS = 16
PROGRAMS_PER_PROCESSOR = 2


def forward(
    q_NHD: torch.Tensor,
    k_MKD: torch.Tensor,
    v_MKD: torch.Tensor,
    sinks_H: torch.Tensor | None,
    layout: TreeLayout,
    rule: ScoreRule,
    tile: Tile,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [N, Hq, E] and log-sum-exp [Hq, N padded with zeros]."""
    num_tokens, heads, _ = q_NHD.shape
    out_NHD = torch.empty((num_tokens, heads, v_MKD.shape[2]), dtype=q_NHD.dtype, device=q_NHD.device)
    lse_HN = q_NHD.new_zeros((heads, num_tokens + -num_tokens % ROW_MULTIPLE), dtype=torch.float32)
    pack, tokens, lists = _query_tiles(tile, heads // k_MKD.shape[1], layout, rule)
    with launch_device(q_NHD.device):
        forward_kernel[(lists.full_count.shape[0], heads // pack)](
            q_NHD, _blocks(k_MKD, tile.keys), _blocks(v_MKD, tile.keys), sinks_H, out_NHD, lse_HN, key_ends(layout),
            key_depths(layout), lists.full_count, lists.full_index, lists.partial_count, lists.partial_index,
            *q_NHD.stride()[:2], out_NHD.stride(0), num_tokens, k_MKD.shape[0], lists.full_index.shape[1],
            lse_HN.stride(0), rule.window or 0, *_log2_factors(rule), GROUP=heads // k_MKD.shape[1], PACK=pack,
            ROWS=tile.rows, TOKENS=tokens, KEYS=tile.keys, SINKS=sinks_H is not None,
            **_options(rule, q_NHD, v_MKD, tile),
        )  # fmt: skip
    return out_NHD, lse_HN


def row_term(out_NHD: torch.Tensor, grad_NHD: torch.Tensor, grad_lse_NH: torch.Tensor | None) -> torch.Tensor:
    """Row term of the softmax gradient, out . grad - grad_lse: [Hq, N padded with zeros]."""
    num_tokens, heads, size = out_NHD.shape
    padded = num_tokens + -num_tokens % ROW_MULTIPLE
    row_term_HN = torch.empty((heads, padded), dtype=torch.float32, device=out_NHD.device)
    with launch_device(out_NHD.device):
        row_term_kernel[(padded // ROW_TERM_ROWS, heads)](
            out_NHD, grad_NHD, grad_lse_NH, row_term_HN, out_NHD.stride(0), *grad_NHD.stride()[:2],
            *((0, 0) if grad_lse_NH is None else grad_lse_NH.stride()), num_tokens, padded, ROWS=ROW_TERM_ROWS,
            LSE_GRADIENT=grad_lse_NH is not None, HEAD_SIZE=size, PADDED_SIZE=padded_size(size),
        )  # fmt: skip
    return row_term_HN


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BackwardInputs:
    """Inputs of the backward kernels."""

    q_NHD: torch.Tensor
    """[N, Hq, D]."""
    k_MKD: torch.Tensor
    """[P + N, Hkv, D]."""
    v_MKD: torch.Tensor
    """[P + N, Hkv, E]."""
    grad_NHD: torch.Tensor
    """[N, Hq, E], gradient of the output."""
    lse_HN: torch.Tensor
    """float32 [Hq, N padded]."""
    row_term_HN: torch.Tensor
    """float32 [Hq, N padded], from `row_term`."""
    layout: TreeLayout
    rule: ScoreRule


def query_gradient(given: BackwardInputs, tile: Tile) -> torch.Tensor:
    """Gradient [N, Hq, D] of the queries."""
    q_NHD, k_MKD, grad_NHD, lse_HN, rule = given.q_NHD, given.k_MKD, given.grad_NHD, given.lse_HN, given.rule
    num_tokens, heads, _ = q_NHD.shape
    grad_q_NHD = torch.empty(q_NHD.shape, dtype=q_NHD.dtype, device=q_NHD.device)
    pack, tokens, lists = _query_tiles(tile, heads // k_MKD.shape[1], given.layout, rule)
    with launch_device(q_NHD.device):
        query_gradient_kernel[(lists.full_count.shape[0], heads // pack)](
            q_NHD, _blocks(k_MKD, tile.keys), _blocks(given.v_MKD, tile.keys), grad_NHD, lse_HN, given.row_term_HN,
            grad_q_NHD, key_ends(given.layout), key_depths(given.layout), lists.full_count, lists.full_index,
            lists.partial_count, lists.partial_index, *q_NHD.stride()[:2], *grad_NHD.stride()[:2],
            grad_q_NHD.stride(0), num_tokens, k_MKD.shape[0], lists.full_index.shape[1], lse_HN.stride(0),
            rule.window or 0, rule.scale, *_log2_factors(rule), GROUP=heads // k_MKD.shape[1], PACK=pack,
            ROWS=tile.rows, TOKENS=tokens, KEYS=tile.keys,
            **_options(rule, q_NHD, given.v_MKD, tile),
        )  # fmt: skip
    return grad_q_NHD


def key_gradients(given: BackwardInputs, tiles: tuple[Tile, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients [P + N, Hkv, D or E] of keys and values, by one kernel with one tile, or by one each with two."""
    k_MKD, v_MKD = given.k_MKD, given.v_MKD
    grads = k_MKD.new_empty(k_MKD.shape), v_MKD.new_empty(v_MKD.shape)
    together = len(tiles) == 1
    with launch_device(k_MKD.device):
        _launch_key_gradients(given, grads, tiles[0], of_keys=True, of_values=together)
        if not together:
            _launch_key_gradients(given, grads, tiles[1], of_keys=False, of_values=True)
    return grads


def _launch_key_gradients(
    given: BackwardInputs, grads: tuple[torch.Tensor, torch.Tensor], tile: Tile, *, of_keys: bool, of_values: bool
) -> None:
    q_NHD, k_MKD, v_MKD, lse_HN, rule = given.q_NHD, given.k_MKD, given.v_MKD, given.lse_HN, given.rule
    num_tokens, heads, _ = q_NHD.shape
    num_keys, key_heads, _ = k_MKD.shape
    sizes = _sizes(k_MKD, v_MKD)
    sum_size = max(sizes["PADDED_SIZE"], sizes["PADDED_VALUE_SIZE"])
    lists = block_lists(given.layout, query_block=tile.rows, key_block=tile.keys, by="key", window=rule.window)
    pieces = key_pieces(given.layout, lists, key_heads=key_heads, programs=_programs(q_NHD.device))
    sums = torch.empty((key_heads, pieces.num_slots, 2, tile.keys, sum_size), dtype=torch.float32, device=q_NHD.device)
    key_gradient_kernel[(pieces.block.shape[0], key_heads)](
        _blocks(q_NHD, tile.rows), k_MKD, v_MKD, _blocks(given.grad_NHD, tile.rows), lse_HN, given.row_term_HN, *grads,
        sums, key_ends(given.layout), key_depths(given.layout), lists.full_count, lists.full_index,
        lists.partial_index, pieces.block, pieces.first_item, pieces.stop_item, pieces.slot, *k_MKD.stride()[:2],
        *v_MKD.stride()[:2], grads[0].stride(0), grads[1].stride(0), num_tokens, num_keys, lists.full_index.shape[1],
        lse_HN.stride(0), pieces.num_slots, rule.window or 0, rule.scale, *_log2_factors(rule),
        GROUP=heads // key_heads, ROWS=tile.rows, KEYS=tile.keys, OF_KEYS=of_keys, OF_VALUES=of_values,
        SUM_SIZE=sum_size, **_options(rule, q_NHD, v_MKD, tile),
    )  # fmt: skip
    rows = min(SUM_ROWS, tile.keys)
    sum_pieces_kernel[(lists.full_count.shape[0] * tile.keys // rows, key_heads)](
        sums, *grads, pieces.first_slot, pieces.slot_count, grads[0].stride(0), grads[1].stride(0), num_keys,
        pieces.num_slots, ROWS=rows, KEYS=tile.keys, OF_KEYS=of_keys, OF_VALUES=of_values, SUM_SIZE=sum_size, **sizes,
    )  # fmt: skip


def readable(t: torch.Tensor) -> torch.Tensor:
    """`t`, copied if needed for block reads: a head is contiguous, tokens and heads start at multiples of 16 bytes.

    Otherwise strides are free, so that head-major tensors are not copied.
    """
    step = 16 // t.element_size()
    rows, heads, size = t.shape
    strides_fit = t.stride(2) == 1 and all(stride > 0 and stride % step == 0 for stride in t.stride()[:2])
    if strides_fit and t.data_ptr() % 16 == 0:
        return t
    aligned = torch.empty((rows, heads, size + -size % step), dtype=t.dtype, device=t.device)[..., :size]
    return aligned.copy_(t)


def _blocks(t: torch.Tensor, rows: int) -> TensorDescriptor:
    """Descriptor for reading blocks of `rows` rows of one head; rows and columns outside of `t` read as 0."""
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, 1, padded_size(t.shape[2])])


def _query_tiles(tile: Tile, group: int, layout: TreeLayout, rule: ScoreRule) -> tuple[int, int, BlockLists]:
    """Query heads per tile, tokens per tile, and the key blocks that each tile sees."""
    pack = group if tile.packed and group <= tile.rows else 1
    tokens = tile.rows // pack
    lists = block_lists(layout, query_block=tokens, key_block=tile.keys, by="query", window=rule.window)
    return pack, tokens, lists


def _programs(device: torch.device) -> int:
    """Programs that the device runs at a time; few in the interpreter, so that its tests also cut lists."""
    if device.type != "cuda":
        return PROGRAMS_PER_PROCESSOR
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _log2_factors(rule: ScoreRule) -> tuple[float, float]:
    """Factors before and after the cap that convert to units of log 2; without a cap only the first is used."""
    if rule.softcap is None:
        return rule.scale * LOG2_E, 0.0
    return 2 * rule.scale / rule.softcap * LOG2_E, rule.softcap * LOG2_E


def _sizes(k_MKD: torch.Tensor, v_MKD: torch.Tensor) -> dict[str, int]:
    """Head sizes of keys and of values, and those of their tiles."""
    size, value_size = k_MKD.shape[2], v_MKD.shape[2]
    return {
        "HEAD_SIZE": size,
        "PADDED_SIZE": padded_size(size),
        "VALUE_SIZE": value_size,
        "PADDED_VALUE_SIZE": padded_size(value_size),
    }


def _options(rule: ScoreRule, q_NHD: torch.Tensor, v_MKD: torch.Tensor, tile: Tile) -> dict[str, Any]:
    return {
        "CAPPED": rule.softcap is not None,
        "WINDOWED": rule.window is not None,
        "PRECISION": tile.precision,
        "IN_REGISTERS": tile.in_registers,
        **_sizes(q_NHD, v_MKD),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
