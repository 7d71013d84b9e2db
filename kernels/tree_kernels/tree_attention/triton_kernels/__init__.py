"""Attention by our Triton kernels."""
