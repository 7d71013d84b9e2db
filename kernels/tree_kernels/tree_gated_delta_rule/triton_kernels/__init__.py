"""The gated delta rule with our Triton kernels."""
