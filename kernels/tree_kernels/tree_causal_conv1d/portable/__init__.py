"""The convolution in plain torch, on any device."""
