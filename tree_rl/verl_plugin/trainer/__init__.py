"""PPO trainers on trees: whole groups, advantages for sessions and trees, metrics."""
