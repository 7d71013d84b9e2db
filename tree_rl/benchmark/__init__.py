"""What `tree-rl bench` runs: whole updates over trees against the same rows packed, or against stock verl."""
