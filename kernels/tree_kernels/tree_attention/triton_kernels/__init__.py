"""Attention with our Triton kernels."""
