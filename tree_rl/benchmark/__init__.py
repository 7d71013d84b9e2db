"""One whole update over a tree against the same rows packed end to end: times, memory, bounds, deviation curves."""
