"""What the runs of swe_learning.py measured: one CSV row for every step of every arm."""

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tree_rl.inspection.files.run_log import read_steps

FIGURES: Mapping[str, str] = {
    "reward": "tree/session_score/mean",
    "sessions": "tree/sessions",
    "rows_per_session": "tree/paths_per_session/mean",
    "flat_tokens": "tree/flat_tokens",
    "unique_tokens": "tree/unique_tokens",
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


class Drawn:
    """Rows that arms rolled out, read on as they are written."""

    def __init__(self) -> None:
        self._read: dict[Path, int] = {}
        self._rows: dict[Path, dict[int, Counter[int]]] = {}

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
        return found


def rows_folder(arguments: argparse.Namespace, arm: str, rollout: str) -> Path:
    """Where a run of an arm dumps its rows."""
    folder: Path = arguments.output / f"{arm}_{rollout}_rows"
    return folder


def precision_of(arm: str) -> str:
    """Suffix by which arms that compute alike are known: `_float32`, or none in bfloat16."""
    return "_float32" if arm.endswith("_float32") else ""


def measured(
    arguments: argparse.Namespace, made_by: Mapping[str, str], rollout: Mapping[str, str], drawn: Drawn
) -> list[dict[str, Any]]:
    """CSV rows of all steps so far.

    `rows_as_in_tree_arm` counts rows that the tree arm of the same precision drew too in that step, and
    `rows_as_in_flat_arm` those that its flat arm drew too; both are empty where that arm has not drawn.

    Args:
        arguments: of the command line.
        made_by: columns that say on what it ran.
        rollout: arm -> how it samples.
        drawn: reader of the rows.
    """
    lines: list[dict[str, Any]] = []
    by_arm = {arm: drawn.rows(rows_folder(arguments, arm, rollout[arm])) for arm in arguments.arms}
    for arm in arguments.arms:
        for step, figures in read_steps(arguments.output / f"{arm}.jsonl"):
            if FIGURES["reward"] not in figures:
                continue
            mine = by_arm[arm].get(step, Counter())
            line: dict[str, Any] = {"seed": arguments.seed, "arm": arm, "step": step}
            line |= {key: f"{figures[name]:.6g}" if name in figures else "" for key, name in FIGURES.items()}
            line["rows"] = mine.total()
            for kind in ("tree", "flat"):
                others = by_arm.get(kind + precision_of(arm), {}).get(step)
                line[f"rows_as_in_{kind}_arm"] = "" if others is None else (mine & others).total()
            lines.append({**line, "rollout": rollout[arm], **made_by})
    return lines
