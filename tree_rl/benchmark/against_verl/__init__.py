"""`tree-rl bench --against verl`: the same rows through stock verl's engine and through ours."""
