"""Reinforcement learning on trees: `python -m tree_rl.train <arguments of verl.trainer.main_ppo>`."""

import sys

from tree_rl.verl_plugin.launch.train import main

if __name__ == "__main__":
    main(sys.argv[1:])
