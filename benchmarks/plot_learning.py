"""Draw the reward curves of `tree_against_flat_learning.py` from its CSV file, one panel per seed.

python benchmarks/plot_learning.py docs/benchmarks/learning_toy_agents.csv
"""

import sys
from pathlib import Path

import matplotlib
import pandas as pd

matplotlib.use("Agg")
from matplotlib import pyplot as plt

LOOKS = {
    "tree": {"color": "#0b6e4f", "linewidth": 4, "alpha": 0.5, "label": "full tree, tree engine"},
    "flat": {"color": "#c8553d", "linestyle": "--", "marker": ".", "label": "the same rows, verl's own engine"},
    "flat_again": {"color": "#e0a458", "linestyle": "-.", "label": "verl's own engine, run again"},
    "longest": {"color": "#4a5a8a", "linestyle": ":", "marker": "x", "label": "longest path alone, tree engine"},
}


def main() -> None:
    """Write a PNG beside each CSV."""
    for name in sys.argv[1:]:
        source = Path(name)
        table = pd.read_csv(source)
        seeds = sorted(table["seed"].unique())
        figure, panels = plt.subplots(1, len(seeds), figsize=(5.5 * len(seeds), 4), sharey=True, squeeze=False)
        for panel, seed in zip(panels[0], seeds, strict=True):
            for arm, look in LOOKS.items():
                curve = table[(table["seed"] == seed) & (table["arm"] == arm)]
                if len(curve):
                    panel.plot(curve["step"], curve["reward"], **look)
            panel.set(title=f"seed {seed}", xlabel="step", ylim=(0, 1))
            panel.grid(alpha=0.3)
        panels[0][0].set_ylabel("mean reward of a step's sessions")
        panels[0][0].legend(loc="lower right", frameon=False)
        figure.tight_layout()
        figure.savefig(source.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main()
