"""Stock verl where flash-attn 2 is absent: flash-attn-4 attends, and one pass computes the log-probs.

Users of verl's example scripts have flash-attn 2, so without these two the comparison would flatter the tree.
Legend: L tokens of a row, H heads, D head size, F packed tokens, V vocabulary.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tree_kernels.edge_log_probs import logits_edge_log_probs
from tree_rl.benchmark.against_packed.packed_attention import BEYOND_ONE_TILE
from tree_rl.verl_plugin.compat import torch_functional, transformer_impl

NAME = "flash_attention_4"
READY = "_tree_rl_takes_rows_of_transformers"


def let_flash_attention_4_read_rows() -> None:
    """Let flash-attn-4 take what transformers 5.10 hands it; to call before the first forward.

    transformers passes the longest row as a tensor on the device, where flash-attn-4 expects a number. It passes a row
    alone in a forward without offsets, for which flash-attn-4 has other kernels: here one kernel computes both.
    """
    import flash_attn.cute as package

    of_rows, dense = package.flash_attn_varlen_func, package.flash_attn_func
    if hasattr(of_rows, READY):
        return

    # transformers reads from the signatures which arguments it may pass.
    @functools.wraps(of_rows)
    def rows(*tensors: torch.Tensor, max_seqlen_q: Any, max_seqlen_k: Any, **more: Any) -> Any:
        longest = max(int(max_seqlen_q), int(max_seqlen_k), BEYOND_ONE_TILE)
        return of_rows(*tensors, max_seqlen_q=longest, max_seqlen_k=longest, **more)

    @functools.wraps(dense)
    def one_row(q_1LHD: torch.Tensor, k_1LHD: torch.Tensor, v_1LHD: torch.Tensor, **more: Any) -> torch.Tensor:
        if len(q_1LHD) != 1:
            raise ValueError(f"{NAME}: expected one row or rows end to end, received a batch of {len(q_1LHD)} rows")
        length = q_1LHD.shape[1]
        offsets = torch.tensor([0, length], dtype=torch.int32, device=q_1LHD.device)
        both = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": length, "max_seqlen_k": length}
        out = rows(q_1LHD[0], k_1LHD[0], v_1LHD[0], **both, **more)
        return (out[0] if isinstance(out, tuple) else out)[None]

    setattr(rows, READY, True)
    package.flash_attn_varlen_func, package.flash_attn_func = rows, one_row


@contextmanager
def log_probs_in_one_pass() -> Iterator[str]:
    """Call `use_one_pass` and yield its result; restore verl's own function afterwards."""
    before = transformer_impl.logprobs_from_logits
    try:
        yield use_one_pass()
    finally:
        transformer_impl.logprobs_from_logits = before


def use_one_pass() -> str:
    """Keep verl from its loop over single tokens, and return what computes log-probs instead."""
    if torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
        return "flash-attn"
    transformer_impl.logprobs_from_logits = fused_log_probs
    return "tree_kernels, from logits"


def fused_log_probs(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True) -> torch.Tensor:
    """verl's `logprobs_from_logits`, never in place: float32 [...] from logits [..., V] and labels int64 [...]."""
    logits_FV = logits.reshape(-1, logits.shape[-1])
    row_F = torch.arange(len(logits_FV), device=logits.device)
    return logits_edge_log_probs(logits_FV, row_F, labels.reshape(-1)).log_prob.view(labels.shape)
