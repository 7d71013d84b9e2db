"""Normalises chat messages: JSON stored as text, role names, content in parts, fields padded with nulls.

Both `tree-rl inspect` and SFT use it.
"""
