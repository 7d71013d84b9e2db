"""How branches come to be: environments, sandboxed workspaces, sessions, and the rows a session leaves behind."""
