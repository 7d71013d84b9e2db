"""Command line of tree SFT."""

import sys

from tree_rl.verl_plugin.launch.early_sft_check import check_sft
from tree_rl.verl_plugin.sft.sft_trainer import main

check_sft(sys.argv)
main()
