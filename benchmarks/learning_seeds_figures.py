"""Curves of arms over several seeds, with 95 % bands, and a table: for each CSV a PNG beside it.

python benchmarks/learning_seeds_figures.py docs/benchmarks/learning_seeds.csv

Bands and intervals are Student's t over seeds; differences are taken seed by seed.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from tree_rl.benchmark.figure import plt, save_figure

LAST = 5
"""Steps whose mean reward the table shows."""
AXES = {
    "step": "step",
    "generated_tokens": "generated tokens, thousands",
    "unique_tokens": "tokens through the update, thousands",
    "step_s": "seconds",
}
"""Columns -> labels. All but the step are summed over the steps so far."""
ENDS = (slice(LAST), slice(-LAST, None))
POINTS = 60
"""Places at which curves over sums are compared, since runs have no steps in common there."""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, two-sided, for 1 to 9 degrees of freedom."""
LOOKS = {
    "tree": ("#0b6e4f", "GRPO, all branches"),
    "longest": ("#c8553d", "GRPO, longest path"),
    "gigpo": ("#3b6fb6", "gigpo"),
    "tree_grpo": ("#8a5aa8", "tree_grpo, branches at turns"),
    "treerl": ("#b58a2b", "treerl, branches at turns"),
    "turns": ("#7d7d7d", "GRPO, branches at turns"),
    "entropy": ("#4a5a8a", "GRPO, branches by entropy"),
    "half": ("#111111", "GRPO, half the sessions"),
}
BASELINE = "tree"


def half_width(values: np.ndarray) -> np.ndarray:
    """Half of the 95 % interval of the mean over the first axis (seeds); NaN for one seed.

    Raises:
        ValueError: there are more seeds than `T_95` has values for.
    """
    count = len(values)
    if count < 2:
        return np.full(values.shape[1:], np.nan)
    if count > len(T_95) + 1:
        raise ValueError(f"{count} seeds: expected at most {len(T_95) + 1}; add Student's t of more to T_95")
    return T_95[count - 2] * values.std(axis=0, ddof=1) / np.sqrt(count)


def spent(run: pd.DataFrame, column: str) -> np.ndarray:
    """Position of every step of a run on an axis."""
    return (run["step"] if column == "step" else run[column].cumsum()).to_numpy(float)


def runs_of(table: pd.DataFrame) -> dict[str, dict[int, pd.DataFrame]]:
    """Arm -> seed -> its steps in order, for the arms of `LOOKS`."""
    found: dict[str, dict[int, pd.DataFrame]] = {}
    for (arm, seed), run in table.groupby(["arm", "seed"]):
        if arm in LOOKS:
            found.setdefault(str(arm), {})[int(seed)] = run.sort_values("step")
    return {arm: found[arm] for arm in LOOKS if arm in found}


def reward_at(run: pd.DataFrame, column: str, budget: float) -> float:
    """Mean reward of the last five steps that end within a budget of an axis."""
    within = run["reward"].to_numpy()[spent(run, column) <= budget * (1 + 1e-9)]
    return float(within[-LAST:].mean())


def draw(runs: dict[str, dict[int, pd.DataFrame]], path: Path) -> None:
    """Write a PNG: mean and band of every arm, over each axis as far as all its seeds reach."""
    figure, panels = plt.subplots(2, 2, figsize=(13, 10), sharey=True)
    for panel, (column, label) in zip(panels.flat, AXES.items(), strict=True):
        scale = 1000.0 if column.endswith("tokens") else 1.0
        for arm, by_seed in runs.items():
            places = [spent(run, column) for run in by_seed.values()]
            start, end = max(place[0] for place in places), min(place[-1] for place in places)
            grid = np.linspace(start, end, POINTS) if column != "step" else np.arange(start, end + 1)
            means = [run["reward"].rolling(3, min_periods=1).mean() for run in by_seed.values()]
            curves = np.array([np.interp(grid, place, mean) for place, mean in zip(places, means, strict=True)])
            colour, name = LOOKS[arm]
            middle, half = curves.mean(axis=0), half_width(curves)
            panel.plot(grid / scale, middle, color=colour, label=f"{name}, seeds: {len(by_seed)}")
            panel.fill_between(grid / scale, middle - half, middle + half, color=colour, alpha=0.15, linewidth=0)
        panel.set(xlabel=label, ylim=(0, 1))
    for panel in panels[:, 0]:
        panel.set_ylabel("mean reward, mean of three steps")
    save_figure(figure, path)


def print_table(runs: dict[str, dict[int, pd.DataFrame]]) -> None:
    """Print the rewards of every arm beside those of GRPO on all branches, at equal steps, tokens and seconds.

    An axis is compared on common seeds, where the run that spends least on it ends.
    """
    print("| arm | seeds | at equal | all branches | arm | difference |")
    print("|---|---|---|---|---|---|")
    for arm, by_seed in runs.items():
        common = sorted(set(by_seed) & set(runs[BASELINE]))
        if arm == BASELINE or not common:
            continue
        pairs = [(runs[BASELINE][seed], by_seed[seed]) for seed in common]
        for column in AXES:
            budget = min(spent(run, column)[-1] for pair in pairs for run in pair)
            base, mine = (
                np.array([reward_at(run, column, budget) for run in arms]) for arms in zip(*pairs, strict=True)
            )
            cells = [mean_and_interval(base, ".3f"), mean_and_interval(mine, ".3f")]
            cells.append(mean_and_interval(mine - base, "+.3f"))
            print(f"| {arm} | {len(common)} | {column}, {budget:,.0f} | {' | '.join(cells)} |")
    budget = min(run["generated_tokens"].sum() for by_seed in runs.values() for run in by_seed.values())
    print(f"\n| arm | seeds | first five steps | last five | at {budget:,} generated tokens |\n|---|---|---|---|---|")
    for arm, by_seed in runs.items():
        ends = [np.array([run["reward"].to_numpy()[part].mean() for run in by_seed.values()]) for part in ENDS]
        ends.append(np.array([reward_at(run, "generated_tokens", budget) for run in by_seed.values()]))
        print(f"| {arm} | {len(by_seed)} |", " | ".join(mean_and_interval(rewards, ".3f") for rewards in ends), "|")


def mean_and_interval(values: np.ndarray, form: str) -> str:
    """Of one seed the value alone."""
    return f"{values.mean():{form}}" + (f" ± {half_width(values):.3f}" if len(values) > 1 else "")


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+", help="CSV files of learning_seeds.py or swe_learning.py")
    for path in parser.parse_args().tables:
        found = runs_of(pd.read_csv(path))
        draw(found, path.with_suffix(".png"))
        print_table(found)


if __name__ == "__main__":
    main()
