"""Direct preference optimisation on trees: `python -m tree_rl.train dpo`, or the same under torchrun."""
