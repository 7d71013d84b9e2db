"""Formats of other tools: texts dumped by trainers, logs of model calls."""
