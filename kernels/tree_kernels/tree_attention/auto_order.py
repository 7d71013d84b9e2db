"""Which implementation `impl="auto"` tries first: a rule from what was measured, not from a model of the kernels."""

FASTEST_FIRST = ("fa4", "triton", "flex")
"""On Hopper, as measured there."""
FASTEST_FIRST_FOR_TINY_SEGMENTS = ("triton", "fa4", "flex")
"""On Hopper, where most visited blocks are seen in part only."""
BEST_KNOWN_FIRST = ("flex", "triton")
"""On other CUDA devices, for which our kernels have not been tuned."""
PARTIAL_SHARE = 0.8
"""Share of partly visible among visited blocks of 128 x 128 from which Triton's tiles of 64 beat flash-attn-4's of 128.

One H200, bf16, 32 query and 8 key heads of size 128, forward plus backward (commit 9a6a261, in
docs/benchmarks/attention.csv): at 8,192 tokens and a share of 0.88 (binary) triton is 18 % faster, at 0.66 (tiny
segments) fa4 4 %. From 32,768 tokens on no share above 0.54 was measured: fa4 is faster throughout, 4 to 5 % there."""
MEASURED_HEAD_SIZE = 128
"""The rule is used at this head size only: others have other tiles, and it was not made for them."""


def order_on_hopper(*, head_size: int, partial_share: float | None) -> tuple[str, ...]:
    """Implementations, the one expected to be fastest first.

    Args:
        head_size: D.
        partial_share: partly visible among visited blocks of 128 x 128 tokens, from 0 to 1; None if nobody counted.
    """
    if head_size != MEASURED_HEAD_SIZE or partial_share is None:
        return FASTEST_FIRST
    return FASTEST_FIRST_FOR_TINY_SEGMENTS if partial_share >= PARTIAL_SHARE else FASTEST_FIRST
