"""What `tree-rl doctor` and the cluster check try before GPUs are taken."""
