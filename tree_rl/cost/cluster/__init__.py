"""Seconds and bytes of a whole training step on a cluster of GPUs."""
