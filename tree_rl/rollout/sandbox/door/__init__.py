"""A confined program's only way out: from a port in its sandbox through a Unix socket to the gateway."""
