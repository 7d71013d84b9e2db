"""What makes branches: environments, sandboxes, sessions, and the rows a session leaves behind."""
