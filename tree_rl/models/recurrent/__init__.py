"""Layers that carry a state along the sequence (Gated DeltaNet, Mamba 2, short convolutions) read trees."""
