"""Starts jobs, and loads the plugin in the same version in all of their processes."""
