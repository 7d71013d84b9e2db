"""Train LLM agents on prefix trees instead of rows."""

__version__ = "0.1.0"
