"""What makes branches: environments, sandboxed workspaces, sessions, and the rows a session leaves behind."""
