"""What the PPO trainers add to verl's: whole groups, advantages that know sessions and trees, metrics."""
