"""`tree-rl report` and `tree-rl top`: what verl's own logs of a run say."""
