"""The recurrence of Mamba 2 by torch alone, on any device."""
