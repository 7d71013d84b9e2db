"""Attention by torch alone: query blocks on any device, FlexAttention on CUDA."""
