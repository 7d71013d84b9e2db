"""The convolution by our Triton kernels."""
