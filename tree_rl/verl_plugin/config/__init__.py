"""Hydra configs that extend verl's: `pkg://tree_rl.verl_plugin.config`."""
