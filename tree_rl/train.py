"""Reinforcement learning on trees: `python -m tree_rl.train <arguments of verl.trainer.main_ppo>`.

`python -m tree_rl.train dpo <arguments>`, or the same by torchrun, trains on preference pairs.
"""

import sys

from tree_rl.extras import missing_extra_as_one_line

if __name__ == "__main__":
    # One of them alone: verl's SFT trainer changes the environment when it is imported.
    if sys.argv[1:2] == ["dpo"]:
        with missing_extra_as_one_line():
            from tree_rl.verl_plugin.launch.dpo import main as train_on_pairs

        train_on_pairs(sys.argv[2:])
    else:
        with missing_extra_as_one_line():
            from tree_rl.verl_plugin.launch.train import main

        main(sys.argv[1:])
