"""Attention with flash-attn-4, an optional package that is imported only when it is used."""
