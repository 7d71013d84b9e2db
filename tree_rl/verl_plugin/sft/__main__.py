"""Command line of tree SFT."""

from tree_rl.verl_plugin.sft.sft_trainer import main

main()
