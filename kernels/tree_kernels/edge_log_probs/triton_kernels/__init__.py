"""Edge log-probs by our Triton kernels."""
