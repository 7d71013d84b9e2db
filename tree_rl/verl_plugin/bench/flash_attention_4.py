"""Stock verl on flash_attention_4 of transformers in `tree-rl bench --against verl`, where flash-attn 2 is absent."""

import functools
from typing import Any

import torch

from tree_rl.benchmark.packed_attention import BEYOND_ONE_TILE

NAME = "flash_attention_4"
READY = "_tree_rl_takes_rows_of_transformers"


def let_flash_attention_4_read_rows() -> None:
    """Let flash-attn-4 take what transformers 5.10 hands it; to call before the first forward.

    transformers passes the length of the longest row as a tensor on the device, where flash-attn-4 compares it as a
    number, and a row that is alone in a forward without offsets, for which flash-attn-4 has other kernels than for rows
    end to end: here one kernel computes both.
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
