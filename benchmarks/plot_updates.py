"""Draw the figures of `tree-rl bench` again from its CSV files, such as those of a machine without matplotlib.

python benchmarks/plot_updates.py docs/benchmarks/update_8b_agents.csv docs/benchmarks/deviation_0.6b_airline_trial.csv
"""

import sys
from pathlib import Path

from tree_rl.benchmark.figure import draw_deviation, draw_speed_up
from tree_rl.benchmark.results import read_csv


def main() -> None:
    """Write a PNG beside each CSV."""
    for name in sys.argv[1:]:
        source = Path(name)
        rows = read_csv(source)
        draw = draw_deviation if "step" in rows[0] else draw_speed_up
        draw(rows, source.with_suffix(".png"))


if __name__ == "__main__":
    main()
