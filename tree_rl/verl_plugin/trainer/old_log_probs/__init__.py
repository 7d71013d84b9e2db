"""Old log-probs: from a pass before the update, as in verl, or from the update's forward."""
