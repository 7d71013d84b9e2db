"""What a forest saves and why it branches, as numbers and drawings."""
