"""Supervised fine-tuning on trees: `python -m tree_rl.verl_plugin.sft`, or the same under torchrun."""

from tree_rl.verl_plugin.sft.sft_trainer import TreeSFTTrainer, group_rows, join_as_only_rank, main

__all__ = ["TreeSFTTrainer", "group_rows", "join_as_only_rank", "main"]
