"""Reads turns of model families, which write reasoning and tool calls in different formats."""
