"""The order in which `impl="auto"` tries implementations, from measurements."""

FASTEST_FIRST = ("fa4", "triton", "flex")
"""Order on Hopper."""
FASTEST_FIRST_FOR_TINY_SEGMENTS = ("triton", "fa4", "flex")
"""Order on Hopper if most visited blocks are only partly visible."""
BEST_KNOWN_FIRST = ("flex", "triton")
"""Order on other CUDA devices, for which our kernels are not tuned."""
PARTIAL_SHARE = 0.8
"""Share of partly visible 128 x 128 blocks above which Triton's tiles of 64 beat flash-attn-4's of 128.

One H200, bf16, 32 query and 8 key heads of size 128, forward plus backward (commit 9a6a261, in
docs/benchmarks/attention.csv): at 8,192 tokens and a share of 0.88 (binary) triton is 18 % faster, at 0.66 (tiny
segments) fa4 is 4 % faster. From 32,768 tokens on no share above 0.54 was measured; there fa4 is 4 to 5 % faster."""
MEASURED_HEAD_SIZE = 128
"""The only head size at which PARTIAL_SHARE was measured and is used; others have other tiles."""


def order_on_hopper(*, head_size: int, partial_share: float | None) -> tuple[str, ...]:
    """Implementations, the expected fastest first; `partial_share` as in `TreeLayout`."""
    if head_size != MEASURED_HEAD_SIZE or partial_share is None:
        return FASTEST_FIRST
    return FASTEST_FIRST_FOR_TINY_SEGMENTS if partial_share >= PARTIAL_SHARE else FASTEST_FIRST
