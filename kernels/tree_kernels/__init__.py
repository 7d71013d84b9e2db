"""Tensor operations over prefix trees: torch and triton only."""
