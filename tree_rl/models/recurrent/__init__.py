"""Lets recurrent layers (Gated DeltaNet, Mamba 2, short convolutions) read trees."""
