"""File operations by descriptor, which are safe while an agent's commands change the files."""
