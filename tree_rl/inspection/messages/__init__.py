"""Chat messages of any writer in one form: JSON kept as text, others' role names, content in parts, null padding.

Every reader takes it, `tree-rl inspect` and SFT alike.
"""
