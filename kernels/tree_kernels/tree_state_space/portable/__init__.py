"""The recurrence of Mamba 2 in plain torch, on any device."""
