"""Supervised fine-tuning on trees: `python -m tree_rl.sft <arguments of verl.trainer.sft_trainer>`, or by torchrun."""

import sys

from tree_rl.extras import missing_extra_as_one_line

with missing_extra_as_one_line():
    from tree_rl.verl_plugin.launch.sft import main

if __name__ == "__main__":
    main(sys.argv[1:])
