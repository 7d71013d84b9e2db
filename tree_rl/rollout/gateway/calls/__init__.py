"""Classifies requests: the calling agent, side calls, and requests for JSON."""
