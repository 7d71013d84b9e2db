"""`tree-rl report`: a summary of a run from verl's logs."""
