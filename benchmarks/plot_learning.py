"""Draw the reward curves of `swe_learning.py` from its CSV files.

One panel per seed and precision: arms named `..._float32` have panels of their own. Usage:

python benchmarks/plot_learning.py docs/benchmarks/swe_learning.csv
"""

import sys
from pathlib import Path
from typing import Any

import pandas as pd

from tree_rl.benchmark.figure import plt, save_figure

LOOKS: dict[str, dict[str, Any]] = {
    "tree": {"color": "#0b6e4f", "linewidth": 4, "alpha": 0.5, "label": "full tree, tree engine"},
    "flat": {"color": "#c8553d", "linestyle": "--", "marker": ".", "label": "the same rows, verl's own engine"},
    "flat_again": {"color": "#3b6fb6", "linestyle": "-.", "marker": "+", "label": "verl's own engine, run again"},
    "longest": {"color": "#4a5a8a", "linestyle": ":", "marker": "x", "label": "longest path alone, tree engine"},
}
PRECISIONS = {"_float32": "float32", "": "bfloat16"}
"""Suffix of arms -> how they compute, in the order of panels."""


def draw(table: pd.DataFrame) -> plt.Figure:
    """A panel for every seed and precision that has arms.

    Args:
        table: CSV with the columns `seed`, `arm`, `step`, `reward`.
    """
    arms = set(table["arm"])
    suffixes = [suffix for suffix in PRECISIONS if any(arm + suffix in arms for arm in LOOKS)]
    wanted = [(seed, suffix) for seed in sorted(table["seed"].unique()) for suffix in suffixes]
    figure, panels = plt.subplots(1, len(wanted), figsize=(5.5 * len(wanted), 4), sharey=True, squeeze=False)
    for panel, (seed, suffix) in zip(panels[0], wanted, strict=True):
        for arm, look in LOOKS.items():
            curve = table[(table["seed"] == seed) & (table["arm"] == arm + suffix)]
            if len(curve):
                panel.plot(curve["step"], curve["reward"], **look)
        named = f", {PRECISIONS[suffix]}" if len(suffixes) > 1 else ""
        panel.set(title=f"seed {seed}{named}", xlabel="step", ylim=(0, 1))
    panels[0][0].set_ylabel("mean reward of a step's sessions")
    return figure


def main() -> None:
    """Write a PNG beside each CSV."""
    for name in sys.argv[1:]:
        save_figure(draw(pd.read_csv(name)), Path(name).with_suffix(".png"))


if __name__ == "__main__":
    main()
