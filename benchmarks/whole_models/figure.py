"""The paper's figure 6 from the results of `whole_model.py`: speed-up over overlap, trees whole and in partitions."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from tree_rl.benchmark.figure import BOUND_COLOUR, TREE_COLOUR, save_figure
from whole_models.arms import PACKED, PARTITIONED, TREE

SUFFIX = f"_over_{PACKED}"
DRAWN = "agents"
"""Name of the batches that `agent_batch` draws."""
MARKERS = "s^vD"


def draw_sweep(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Write a PNG with a panel for every model and loss whose drawn rows had two overlaps or more; else nothing."""
    panels: dict[str, list[Mapping[str, str]]] = {}
    for row in sorted((row for row in rows if row["batch"] == DRAWN), key=lambda row: float(row["por"])):
        panels.setdefault(f"{row['model']}, {row['layers']} layers, {row['gpus']} GPUs, {row['loss']}", []).append(row)
    panels = {title: found for title, found in panels.items() if len({row["por"] for row in found}) > 1}
    if not panels:
        return
    figure, all_axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4), squeeze=False)
    for axes, (title, found) in zip(all_axes[0], panels.items(), strict=True):
        por = [float(row["por"]) for row in found]
        for bound, label, style in (("token_bound", "1 / (1 - POR)", ":"), ("flop_bound", "FLOP bound", "--")):
            axes.plot(por, [float(row[bound]) for row in found], style, color=BOUND_COLOUR, label=label)
        names = [name for name in found[0] if name.endswith(SUFFIX) and name.startswith((TREE, PARTITIONED))]
        for index, name in enumerate(names):
            points = [(float(row["por"]), float(row[name])) for row in found if row[name]]
            is_whole = name == TREE + SUFFIX
            look = {"color": TREE_COLOUR, "alpha": 1.0 if is_whole else 0.5, "label": name.removesuffix(SUFFIX)}
            marker = "o-" if is_whole else f"{MARKERS[index % len(MARKERS)]}--"
            axes.plot(*zip(*points, strict=True), marker, **look)
        axes.set(xlabel="potential overlap ratio", ylabel="speed-up over packed rows", title=title)
    save_figure(figure, path)
