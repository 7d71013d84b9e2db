"""Old log-probs: a pass before the update as in verl, or the forward of the update itself."""
