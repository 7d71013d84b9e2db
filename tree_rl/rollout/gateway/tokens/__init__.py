"""Converts between text and token ids: the chat template, exact prompts, recorded turns."""
