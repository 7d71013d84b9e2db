"""Adapters for environments of other libraries, which only their adapters import."""
