"""Bytes that a forest keeps alive, and the cheapest way to run it within a budget."""
