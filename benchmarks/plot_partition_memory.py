"""Draw peak memory against tree size from the CSV that `partition_gpu.py memory` wrote.

python benchmarks/plot_partition_memory.py docs/benchmarks/partition_memory_0.6b.csv
"""

import sys
from pathlib import Path

from tree_rl.benchmark.figure import plt, save_figure
from tree_rl.benchmark.results import read_csv

STYLES = {
    ("bushy", "False"): ("bushy: 8k prompt, 4k branches", "#1f5fa8", "o-"),
    ("deep", "False"): ("deep: one trunk, four stubs", "#b5532a", "s-"),
    ("deep", "True"): ("deep, waiting K/V in host memory", "#e0a060", "s--"),
}


def main() -> None:
    """Write the PNG beside the CSV."""
    source = Path(sys.argv[1])
    rows = read_csv(source)
    figure, axes = plt.subplots(figsize=(7, 4))
    for (shape, offload), (label, colour, style) in STYLES.items():
        points = [row for row in rows if (row["shape"], row["offload"]) == (shape, offload)]
        sizes = [int(row["unique"]) / 1000 for row in points]
        axes.plot(sizes, [float(row["peak_gib"]) for row in points], style, color=colour, label=label)
    axes.set_xscale("log")
    axes.set_ylim(0)
    axes.set_xlabel("unique tokens (thousand)")
    axes.set_ylabel("peak allocated (GiB)")
    axes.set_title(f"Peak memory at C = {int(rows[0]['capacity']):,} tokens, {rows[0]['gpu']}")
    save_figure(figure, source.with_suffix(".png"))


if __name__ == "__main__":
    main()
