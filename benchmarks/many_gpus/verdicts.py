"""What was measured on several GPUs against its targets."""

import statistics
from collections.abc import Iterable, Sequence

from many_gpus.shares import BALANCED, EQUAL

Line = dict[str, str]
"""A row of a CSV file."""
EFFICIENCY, COST_ERROR = 0.92, 0.05
SPEED_OF_FOUR, PEAK_OF_FOUR = 3.5, 0.35
"""Targets of one tree on four GPUs that share its tokens, over one GPU; other numbers of GPUs in proportion."""
RECURRENT_SLACK = 0.9
"""Factor on the targets for models with recurrent layers."""


def met(figure: float, target: float, *, at_least: bool = True) -> str:
    """A target, and whether the figure reaches it."""
    word, reached = ("at least", figure >= target) if at_least else ("at most", figure <= target)
    return f"target {word} {target:.4g}: {'met' if reached else 'missed'}"


def scaling_report(rows: Sequence[Line]) -> str:
    """t(1) / t(n) at the same work a GPU, medians over all runs; in brackets between the extremes of single steps."""
    seconds: dict[tuple[str, ...], list[float]] = {}
    imbalances: dict[tuple[str, ...], float] = {}
    for row in rows:
        about = (row["model"], row["layers"], row["shape"], row["trees_per_gpu"], row.get("mini_batches") or "1")
        key = (*about, row["arm"], row["gpus"], row.get("sharing") or "1")
        seconds.setdefault(key, []).extend(map(float, row["steps_s"].split()))
        imbalances[key] = float(row["imbalance"])
    lines = []
    for key, here in seconds.items():
        model, layers, shape, trees, mini_batches, arm, gpus, sharing = key
        alone = seconds.get((*key[:5], EQUAL, "1", "1"))
        line = f"{model} {layers} layers, {shape}, {trees} trees a GPU, {mini_batches} mini-batches, {arm}, {gpus} GPUs"
        line += "" if sharing == "1" else f", {sharing} share tokens"
        line += f": {statistics.median(here):.4f} s ({min(here):.4f} to {max(here):.4f}, {len(here)} steps)"
        if gpus != "1" and alone:
            # A rank of S GPUs holds the work of one.
            shared = int(sharing)
            ratio = statistics.median(alone) / statistics.median(here) / shared
            low, high = min(alone) / max(here) / shared, max(alone) / min(here) / shared
            line += f", imbalance {imbalances[key]:.3f}, t(1)/t(n) {ratio:.3f} ({low:.3f} to {high:.3f})"
            line += f", {met(ratio, EFFICIENCY)}" if arm in (EQUAL, BALANCED) else ""
        lines.append(line)
    return "\n".join([*lines, *cost_errors(rows)])


def cost_errors(rows: Iterable[Line]) -> list[str]:
    """`tree/cost_error` of each run that made more than five updates: the median of those behind the fifth."""
    last = {
        (row["model"], row["layers"], row["gpus"], row.get("sharing") or "1", row.get("commit", "")): row
        for row in rows
        if row.get("cost_error") and row.get("updates")
    }
    return [
        f"tree/cost_error, {model} {layers} layers, {gpus} GPUs, {sharing} share tokens, {row['updates']} updates: "
        f"{float(row['cost_error']):.4f}, {met(float(row['cost_error']), COST_ERROR, at_least=False)}"
        for (model, layers, gpus, sharing, _), row in last.items()
    ]


def trunk_report(rows: Sequence[Line]) -> str:
    """Speed and peak memory of GPUs that share one tree against one GPU with the full weights; the last run counts."""
    shape = ("model", "layers", "layer_kernels", "trunk", "branches", "branch_tokens")
    runs = {(*(row[name] for name in shape), row["gpus"], row["sharing"]): row for row in rows}
    lines = []
    for key, row in runs.items():
        model, layers, _, trunk, branches, branch_tokens, gpus, sharing = key
        line = f"{model} {layers} layers, trunk {trunk} with {branches} x {branch_tokens}, {gpus} GPUs, {sharing} share"
        if row["failed"]:
            lines.append(f"{line}: {row['failed']}")
            continue
        line += (
            f": {float(row['seconds']):.4f} s, peak {float(row['peak_gib']):.2f} GiB, {row['partitions']} partitions"
        )
        alone = runs.get((*key[:6], "1", "1"))
        if sharing != "1" and (alone is None or alone["failed"]):
            line += ", nothing on one GPU to compare with"
        elif sharing != "1" and alone is not None:
            slack = RECURRENT_SLACK if "3.5" in model else 1.0
            line += "; " + against_one(row, alone, SPEED_OF_FOUR * slack, PEAK_OF_FOUR / slack)
        lines.append(line)
    return "\n".join(lines)


def against_one(row: Line, alone: Line, speed_of_four: float, peak_of_four: float) -> str:
    """Speed, memory and gradient of a run of GPUs that share a tree over those of one GPU."""
    gpus = int(row["gpus"])
    speed = float(alone["seconds"]) / float(row["seconds"])
    parts = [f"{speed:.2f} times as fast, {met(speed, speed_of_four * gpus / 4)}"]
    if float(alone["peak_gib"]):
        peak = float(row["peak_gib"]) / float(alone["peak_gib"])
        parts.append(f"{peak:.3f} of its memory, {met(peak, peak_of_four * 4 / gpus, at_least=False)}")
    parts.append(f"gradient norm off by {abs(float(row['gradient_norm']) / float(alone['gradient_norm']) - 1):.1e}")
    return "; ".join(parts)
