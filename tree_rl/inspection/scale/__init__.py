"""Predicts a training step on a cluster: work of the slowest rank, FSDP's collectives, memory, the first bottleneck."""
