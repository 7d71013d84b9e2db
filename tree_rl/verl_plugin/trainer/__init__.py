"""What the PPO trainers add to verl's: whole groups, tree-native advantages, metrics, resuming."""
