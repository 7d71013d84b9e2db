"""Rollouts with branches: environments, sandboxes, agents, the recording gateway, and the rows of a session."""
