"""Whole models under FSDP2 on random weights: trees against rows, on one set of weights."""
