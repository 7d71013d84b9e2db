"""Draw the figures of `tree-rl bench` again from its CSV files, such as those of a machine without matplotlib.

python benchmarks/plot_updates.py docs/benchmarks/update_8b_agents.csv docs/benchmarks/deviation_0.6b_airline_trial.csv
"""

import csv
import sys
from pathlib import Path

from tree_rl.benchmark.figure import draw_deviation, draw_speed_up


def main() -> None:
    """Write a PNG beside each CSV."""
    for name in sys.argv[1:]:
        source = Path(name)
        with source.open(newline="") as file:
            rows = list(csv.DictReader(file))
        draw = draw_deviation if "step" in rows[0] else draw_speed_up
        title = f"{rows[0]['model']}, {rows[0]['layers']} layers, {rows[0]['device']}"
        draw(rows, source.with_suffix(".png"), title=title)


if __name__ == "__main__":
    main()
