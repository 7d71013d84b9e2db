"""Edge log-probs in plain torch, on any device."""
