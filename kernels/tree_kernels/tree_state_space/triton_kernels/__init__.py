"""Triton kernels of Mamba 2's recurrence; the walks, outputs and gradients are those of the gated delta rule."""
