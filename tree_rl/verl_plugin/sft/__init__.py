"""Supervised fine-tuning on trees: `python -m tree_rl.verl_plugin.sft`, or the same under torchrun."""

from tree_rl.verl_plugin.sft.conversations import ConversationSampler, conversations_of_rows
from tree_rl.verl_plugin.sft.sft_trainer import TreeSFTTrainer, group_rows, join_as_only_rank, main, run_sft
from tree_rl.verl_plugin.sft.token_rows_dataset import TokenRowsDataset

__all__ = [
    "ConversationSampler",
    "TokenRowsDataset",
    "TreeSFTTrainer",
    "conversations_of_rows",
    "group_rows",
    "join_as_only_rank",
    "main",
    "run_sft",
]
