"""Commands of `tree-rl`, a module each; `tree_rl.cli` puts them together."""
