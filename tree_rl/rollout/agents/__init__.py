"""Agents that call a recorded model over HTTP and work in an environment."""
