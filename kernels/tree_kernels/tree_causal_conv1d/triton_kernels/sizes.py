"""Block sizes of the convolution's kernels. This file does not import Triton."""

TOKENS, CHANNELS = 32, 128
"""Tokens and channels of a program."""
WARPS = 4
PROVEN_TAPS = 4
"""Taps at which compiled kernels were held against float64 on a GPU; see kernels/README.md."""
