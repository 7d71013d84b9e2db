"""File work by descriptor: what an agent's commands may change meanwhile."""
