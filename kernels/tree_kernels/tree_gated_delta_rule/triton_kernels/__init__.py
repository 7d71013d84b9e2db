"""The gated delta rule by our Triton kernels."""
