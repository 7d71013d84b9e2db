"""Blocked tree attention against torch's plain causal attention on the CPU, where no prefix is shared.

Run: python benchmarks/kernels/attention_cpu.py [--tokens 1024 4096] [--block-tokens 64 128 256]
Legend: N tokens, H heads, D head size.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from tree_kernels.layout import TreeLayout
from tree_kernels.tree_attention.portable.blocked import blocked_attention
from tree_kernels.tree_attention.reference import reference_attention
from tree_kernels.tree_attention.score_rule import ScoreRule

HEAD_LAYOUTS = ((4, 2, 16), (8, 2, 64), (8, 4, 128))


def median_ms(run: Callable[[], None], repeats: int = 5) -> float:
    """Median wall time of `run` in milliseconds after one warm-up."""
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return sorted(times)[repeats // 2] * 1e3


def trunk_with_stubs(tokens: int, turns: int = 16) -> torch.Tensor:
    """subtree_end of a trunk with a stub of equal length off each turn, heavy child first."""
    turn = max(1, tokens // (2 * turns))
    end = torch.full((tokens,), tokens, dtype=torch.int32)
    for t in range(1, turns):
        end[t * turn : (t + 1) * turn] = tokens - t * turn
    stubs = torch.arange(turns * turn, tokens)
    end[stubs] = ((stubs // turn + 1) * turn).clamp(max=tokens).to(torch.int32)
    return end


def chain(tokens: int) -> torch.Tensor:
    """subtree_end of one path."""
    return torch.full((tokens,), tokens, dtype=torch.int32)


def plain_causal(q_NHD: torch.Tensor, k_NHD: torch.Tensor, v_NHD: torch.Tensor) -> torch.Tensor:
    """torch's causal attention on the same tensors."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q_NHD, k_NHD, v_NHD))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


def measure(tokens: int, heads: tuple[int, int, int], block_sizes: list[int]) -> None:
    """Print one line per block size, after a correctness gate against the reference."""
    num_q, num_k, size = heads
    torch.manual_seed(0)
    leaves = [torch.randn(tokens, count, size, requires_grad=True) for count in (num_q, num_k, num_k)]
    grad = torch.randn(tokens, num_q, size)

    def step(forward: Callable[..., torch.Tensor]) -> None:
        torch.autograd.grad(forward(*leaves), leaves, grad)

    causal_ms = median_ms(lambda: step(plain_causal))
    rule = ScoreRule(scale=size**-0.5)
    for name, end in (("chain", chain(tokens)), ("stubs", trunk_with_stubs(tokens))):
        layout = TreeLayout.from_subtree_end(end)
        for block_tokens in block_sizes:

            def blocked(
                *qkv: torch.Tensor, layout: TreeLayout = layout, block_tokens: int = block_tokens
            ) -> torch.Tensor:
                return blocked_attention(*qkv, None, layout, rule, block_tokens=block_tokens)

            if tokens <= 4096:
                expected = reference_attention(*leaves, None, layout, rule)[0]
                torch.testing.assert_close(blocked(*leaves), expected, atol=1e-4, rtol=1e-4)
            blocked_ms = median_ms(lambda: step(blocked))
            print(
                f"{tokens},{num_q}/{num_k}x{size},{name},{block_tokens},{causal_ms:.1f},{blocked_ms:.1f},"
                f"{blocked_ms / causal_ms:.2f}"
            )


def main() -> None:
    """Print CSV: forward and backward of plain causal attention and of the blocked tree attention."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--block-tokens", type=int, nargs="+", default=[64, 128, 256])
    arguments = parser.parse_args()
    print(f"# torch {torch.__version__}, float32, {torch.get_num_threads()} threads")
    print("tokens,heads,tree,block_tokens,causal_ms,blocked_ms,ratio")
    for tokens in arguments.tokens:
        for heads in HEAD_LAYOUTS:
            measure(tokens, heads, arguments.block_tokens)


if __name__ == "__main__":
    main()
