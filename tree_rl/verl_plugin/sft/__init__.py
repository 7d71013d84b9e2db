"""Supervised fine-tuning on trees: `python -m tree_rl.sft`, or the same under torchrun."""

from tree_rl.verl_plugin.sft.checked_data import group_rows
from tree_rl.verl_plugin.sft.sft_trainer import TreeSFTTrainer, join_as_only_rank
from tree_rl.verl_plugin.sft.token_rows_dataset import TokenRowsDataset

__all__ = ["TokenRowsDataset", "TreeSFTTrainer", "group_rows", "join_as_only_rank"]
