"""The earlier name of `python -m tree_rl.sft`, for one release."""

raise SystemExit("python -m tree_rl.verl_plugin.sft is now python -m tree_rl.sft, with the same arguments")
