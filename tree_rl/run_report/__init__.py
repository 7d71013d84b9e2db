"""`tree-rl report`: what verl's own logs of a run say."""
