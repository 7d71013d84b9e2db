"""Block sizes of the convolution's kernels. This file does not import Triton."""

TOKENS, CHANNELS = 32, 128
"""Tokens and channels per program."""
WARPS = 4
PROVEN_TAPS = 4
"""Number of taps for which compiled kernels were compared with float64 on a GPU; see kernels/README.md."""
