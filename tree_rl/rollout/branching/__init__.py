"""Sessions that branch on purpose: which recorded session, where, how often, and how a branch starts there."""
