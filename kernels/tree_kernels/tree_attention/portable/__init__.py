"""Attention in plain torch: query blocks on any device, FlexAttention on CUDA."""
