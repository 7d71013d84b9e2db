"""Edge log-probs with our Triton kernels."""
