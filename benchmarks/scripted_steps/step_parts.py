"""Where the seconds of each step went, and what Amdahl's law makes of an update's ratio.

A step lasts from the start of its first session to the start of the next step's, so its parts add up to it. Apart,
where rollouts have GPUs of their own, all but the rollout do, which runs beside them for the next step.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tree_rl.inspection.files.run_log import read_steps

TIMED = {"old_log_probs_s": "old_log_prob", "ref_s": "ref", "update_s": "update_actor", "weights_s": "update_weights"}
"""Column -> verl's timer."""
PARTS = ("rollout_s", "waiting_s", *TIMED, "rest_s")
"""Rollout: sessions run. Waiting: all have ended, the trainer has not looked; apart, it waits for sessions. Weights:
servers sleep, get the new weights and wake. Rest: queues, balancing; advantages and metrics in so far as no pass or
rollout runs beside them."""
UPDATE = ("old_log_probs_s", "ref_s", "update_s")
"""What trees shorten."""
COUNTS = ("rows", "flat_tokens", "generated_tokens")
MEDIANS = ("step_s", *PARTS, "gpu_idle_share", "gpu_memory_gib", "trainer_memory_gib")


def step_rows(folder: Path, *, apart: bool = False) -> list[dict[str, Any]]:
    """One row for each step whose sessions ended and whose end was seen, which the last one's never is.

    Args:
        folder: with `metrics.jsonl`, `stamps/` and, from a GPU, `gpus.jsonl`.
        apart: whether rollouts had GPUs of their own.
    """
    metrics = dict(read_steps(folder / "metrics.jsonl"))
    stamps = read_stamps(folder)
    seen = folder / "gpus.jsonl"
    looks = [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []
    begins = {step: min(one["started"] for one in of_step if "started" in one) for step, of_step in stamps.items()}
    return [
        _step_row(step, (begins[step], begins[step + 1]), metrics[step], stamps[step], looks, apart=apart)
        for step in sorted(begins)
        if step in metrics and step + 1 in begins and have_ended(stamps[step])
    ]


def read_stamps(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What the agent loops and the buffer of a run noted, by step."""
    stamps: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for path in (folder / "stamps").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            figures = json.loads(line)
            stamps[figures["step"]].append(figures)
    return stamps


def have_ended(stamps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a step's sessions have started and ended."""
    started, ended = (sum(name in one for one in stamps) for name in ("started", "ended"))
    return started == ended > 0


def _step_row(
    step: int,
    window: tuple[float, float],
    metrics: Mapping[str, float],
    stamps: Sequence[Mapping[str, float]],
    looks: Sequence[Mapping[str, Any]],
    *,
    apart: bool,
) -> dict[str, Any]:
    begin, end = window
    sessions = [one for one in stamps if "ended" in one]
    (taken,) = (one for one in stamps if "taken" in one)
    last = max(one["ended"] for one in sessions)
    row: dict[str, Any] = {"step": step, "step_s": end - begin, "rollout_s": last - begin}
    row["waiting_s"] = taken["taken"] - (taken["asked"] if apart else last)
    row |= {name: metrics.get(f"timing_s/{timer}", 0.0) for name, timer in TIMED.items()}
    asked_for = metrics["timing_s/gen"] - metrics.get("tree/head_start_seconds", 0.0)
    row["weights_s"] += asked_for - (taken["taken"] - taken["asked"])
    row["rest_s"] = row["step_s"] - sum(row[name] for name in PARTS[apart:-1])
    row |= {"rows": taken["rows"], "flat_tokens": taken["flat_tokens"]}
    row["generated_tokens"] = sum(one["generated"] for one in sessions)
    row["trainer_memory_gib"] = metrics.get("actor/perf/max_memory_allocated_gb", "")
    seen = [look for look in looks if begin <= look["time"] < end]
    if seen:
        each = [statistics.fmean(idle) for idle in zip(*(look["idle"] for look in seen), strict=True)]
        row["gpu_idle_share"], row["gpus_idle"] = statistics.fmean(each), " ".join(f"{idle:.3f}" for idle in each)
        row["gpu_memory_gib"] = max(look["memory_gib"] for look in seen)
    return row


def summary(counted: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over measured steps, and the range of whole steps. Raises `ValueError` without any."""
    if not counted:
        raise ValueError("expected a measured step before the last one, received none; raise --steps")
    columns: dict[str, Any] = {"steps": len(counted)}
    for name in MEDIANS:
        values = [row[name] for row in counted if row.get(name, "") != ""]
        columns[name] = statistics.median(values) if values else ""
    seconds = [row["step_s"] for row in counted]
    return (
        columns
        | {"step_s_low": min(seconds), "step_s_high": max(seconds)}
        | {name: counted[-1].get(name, "") for name in (*COUNTS, "gpus_idle")}
    )


def amdahl(stock: Mapping[str, Any], update_ratio: float) -> float:
    """Speed-up of a whole step if only old log-probs, reference and update change, by one GPU's ratio.

    `stock` is the `summary` of the stock arm, `update_ratio` stock's seconds over the tree's.
    """
    share = sum(stock[name] for name in UPDATE) / stock["step_s"]
    return 1 / (1 - share + share / update_ratio)
