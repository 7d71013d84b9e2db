"""What a training step takes on a cluster: work of the slowest rank, FSDP's collectives, memory, what breaks first."""
