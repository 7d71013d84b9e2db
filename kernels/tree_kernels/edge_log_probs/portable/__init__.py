"""Edge log-probs by torch alone, on any device."""
