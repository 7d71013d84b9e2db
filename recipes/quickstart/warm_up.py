"""The warm-up in one process: writes what the quickstart starts from, then runs tree SFT on the demonstrations."""

import argparse
from pathlib import Path

from quickstart.prepare import prepare

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--demonstrations", type=int, required=True)
    parser.add_argument("sft", nargs="+", help="arguments of tree_rl.sft, behind --")
    arguments = parser.parse_args()
    prepare(arguments.folder, seed=arguments.seed, demonstrations=arguments.demonstrations)
    # verl's trainer takes long to import, and reads the files that now exist.
    from tree_rl.verl_plugin.launch.sft import main

    main(arguments.sft)
