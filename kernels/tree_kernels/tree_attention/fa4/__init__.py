"""Attention by flash-attn-4, which is optional: nothing here is imported before it is asked for."""
