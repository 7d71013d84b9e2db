"""What the runs of swe_learning.py measured: one CSV row for every step of every arm, and their reward curves.

python benchmarks/swe_learning_figures.py docs/benchmarks/swe_learning.csv
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from tree_rl.inspection.files.run_log import read_steps

sys.path.insert(0, str(Path(__file__).parent))
from swe_learning_overrides import first_sessions, rows_folder, run_name

FLOAT32 = "_float32"
"""Suffix of arms that compute in float32; the others do in bfloat16."""
SCORE = "tree/session_score/mean"
"""Metric that every step of training has."""
FIGURES: Mapping[str, str] = {
    "all_sessions_reward": SCORE,
    "sessions": "tree/sessions",
    "generated_tokens": "rollout/generated_tokens",
    "rows_per_session": "tree/paths_per_session/mean",
    "flat_tokens": "tree/flat_tokens",
    "unique_tokens": "tree/unique_tokens",
    "branches_per_session": "tree/branches_per_session",
    "unforked_sessions": "rollout/unforked_sessions",
    "gradient_norm": "actor/grad_norm",
    "policy_loss": "actor/pg_loss",
    "entropy": "actor/entropy",
    "step_s": "timing_s/step",
    "rollout_s": "timing_s/gen",
    "log_probs_s": "timing_s/old_log_prob",
    "update_s": "timing_s/update_actor",
    "weights_s": "timing_s/update_weights",
    "rollout_prob_error_max": "training/rollout_probs_diff_max",
    "rollout_prob_error_mean": "training/rollout_probs_diff_mean",
    "rollout_kl": "rollout_corr/kl",
    "self_check_error": "tree/self_check_error",
    "memory_gb": "actor/perf/max_memory_allocated_gb",
}

LOOKS: dict[str, dict[str, Any]] = {
    "tree": {"color": "#0b6e4f", "linewidth": 4, "alpha": 0.5, "label": "full tree, tree engine"},
    "flat": {"color": "#c8553d", "linestyle": "--", "marker": ".", "label": "the same rows, verl's own engine"},
    "flat_again": {"color": "#3b6fb6", "linestyle": "-.", "marker": "+", "label": "verl's own engine, run again"},
    "longest": {"color": "#4a5a8a", "linestyle": ":", "marker": "x", "label": "longest path alone, tree engine"},
}
PRECISIONS = {FLOAT32: "float32", "": "bfloat16"}
"""Suffix of arms -> how they compute, in the order of panels."""


class Drawn:
    """Rows that arms rolled out, read on as they are written."""

    def __init__(self) -> None:
        self._read: dict[Path, int] = {}
        self._rows: dict[Path, dict[int, Counter[int]]] = {}
        self._rewards: dict[tuple[Path, int], dict[tuple[str, int], float]] = {}

    def rows(self, folder: Path) -> Mapping[int, Counter[int]]:
        """Step -> how often each row was drawn so far.

        Args:
            folder: `rollout.custom.tree_dump_dir` of a run.
        """
        found = self._rows.setdefault(folder, {})
        for path in sorted(folder.glob("train-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                row = json.loads(line)
                found.setdefault(row["step"], Counter())[hash((*row["prompt_ids"], -1, *row["response_ids"]))] += 1
                self._rewards.setdefault((folder, row["step"]), {})[row["uid"], row["session"]] = row["reward"]
        return found

    def first_reward(self, folder: Path, step: int, sessions: int) -> float:
        """Mean reward of each prompt's first sessions in a step that `rows` has read.

        Policies choose where sessions branch, so the mean over all sessions would depend on more than the weights.
        """
        of_session = self._rewards[folder, step]
        return mean(reward for (_, session), reward in of_session.items() if session < sessions)


def step_columns(
    metrics: Path, rows: Path, first_sessions: int, drawn: Drawn
) -> Iterator[tuple[Counter[int], dict[str, Any]]]:
    """Rows that a run drew in each step so far, and columns of the CSV; `reward` is the mean over first sessions.

    Args:
        metrics: what verl's `file` logger wrote.
        rows: `rollout.custom.tree_dump_dir` of the run.
        first_sessions: of each prompt.
    """
    by_step = drawn.rows(rows)
    for step, figures in read_steps(metrics):
        if SCORE in figures:
            columns: dict[str, Any] = {"step": step, "reward": f"{drawn.first_reward(rows, step, first_sessions):.6g}"}
            columns |= {key: f"{figures[name]:.6g}" if name in figures else "" for key, name in FIGURES.items()}
            mine = by_step.get(step, Counter())
            yield mine, {**columns, "rows": mine.total()}


def measured(arguments: argparse.Namespace, made_by: Mapping[str, str], drawn: Drawn) -> list[dict[str, Any]]:
    """CSV rows of all steps so far.

    `rows_as_in_tree_arm` counts rows that the tree arm of the same precision and seed drew too in that step, and
    `rows_as_in_flat_arm` those that its flat arm drew too; both are empty where that arm has not drawn.
    """
    lines: list[dict[str, Any]] = []
    runs = [(arm, seed) for seed in arguments.seeds for arm in arguments.arms]
    by_run = {run: drawn.rows(rows_folder(arguments, *run)) for run in runs}
    for arm, seed in runs:
        metrics, rows = arguments.output / f"{run_name(arm, seed)}.jsonl", rows_folder(arguments, arm, seed)
        precision = FLOAT32 if arm.endswith(FLOAT32) else ""
        for mine, columns in step_columns(metrics, rows, first_sessions(arm, arguments.sessions), drawn):
            for kind in ("tree", "flat"):
                others = by_run.get((kind + precision, seed), {}).get(columns["step"])
                columns[f"rows_as_in_{kind}_arm"] = "" if others is None else (mine & others).total()
            lines.append({"seed": seed, "arm": arm, **columns, "rollout": arguments.rollout, **made_by})
    return lines


def draw(path: Path) -> None:
    """Write a PNG beside a CSV: a panel for every seed and precision that has arms."""
    import pandas as pd

    from tree_rl.benchmark.figure import plt, save_figure

    table = pd.read_csv(path)
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
    save_figure(figure, path.with_suffix(".png"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+", help="CSV files of swe_learning.py")
    for table in parser.parse_args().tables:
        draw(table)
