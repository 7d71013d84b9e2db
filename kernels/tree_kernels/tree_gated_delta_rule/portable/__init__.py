"""The gated delta rule by torch alone, on any device."""
