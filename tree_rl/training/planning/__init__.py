"""From rows to micro-batches within a budget of tokens."""
