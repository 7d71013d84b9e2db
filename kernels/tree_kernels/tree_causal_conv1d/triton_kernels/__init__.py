"""The convolution with our Triton kernels."""
