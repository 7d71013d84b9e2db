"""The gated delta rule in plain torch, on any device."""
