"""Prints what a healthy first run shows, beside what this run showed."""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tree_rl.inspection.files.run_log import RunLog, read_run

ATTENTION = {"gpu": ("fa4", "triton", "flex"), "cpu": ("sdpa",)}
SELF_CHECK = {"gpu": 0.03, "cpu": 1e-5}
"""Normal difference between trees and rows with random weights: bf16 on a GPU, float32 on a CPU."""
OF_REAL_WEIGHTS = {"gpu": 1.0, "cpu": 1e-4}
"""The same with a trained model, whose logits are larger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One expectation."""

    name: str
    expected: str
    got: str
    holds: bool

    def __str__(self) -> str:
        return f"{'ok ' if self.holds else 'NOT'}  {self.name:<38} expected {self.expected:<22} got {self.got}"


def within(name: str, value: float | None, low: float, high: float, unit: str = "") -> Line:
    """Expect a figure between two bounds."""
    got = "nothing" if value is None else f"{value:.3g}{unit}"
    is_within = value is not None and low <= value <= high
    return Line(name=name, expected=f"{low:g} to {high:g}{unit}", got=got, holds=is_within)


def lines(run: RunLog, log: str, *, device: str, seconds: float, model: str = "") -> Iterator[Line]:
    """All expectations of a run, from its metrics, the text of its console, and its seconds, the start included.

    `model` is the folder of a trained model; "" means random weights.
    """
    attention = re.search(r"\battention: (\w+)", log)
    chosen = attention[1] if attention else "nothing"
    wanted, most = ATTENTION[device], (OF_REAL_WEIGHTS if model else SELF_CHECK)[device]
    yield Line(name="attention", expected=" or ".join(wanted), got=chosen, holds=chosen in wanted)
    yield within("overlap (POR)", run.mean("tree/por"), 0.3, 0.9)
    yield within("tokens that updates left out", run.mean("tree/realised_saving"), 0.3, 0.9)
    yield within("log-probs, trees against rows", run.latest("tree/self_check_error"), 0.0, most)
    yield within("log-probs, rollout against update", run.mean("rollout_corr/log_ppl_abs_diff"), 0.0, 0.02)
    yield within("seconds of the whole run", seconds, 0, 600, " s")


def main() -> None:
    """Exit with code 1 if an expectation fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=list(ATTENTION), required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--model", default="", help="folder of a trained model; random weights without one")
    given = parser.parse_args()
    run = read_run(given.folder / "metrics.jsonl")
    log = (given.folder / "log.txt").read_text(errors="replace")
    found = list(lines(run, log, device=given.device, seconds=given.seconds, model=given.model))
    print("\nExpected values are bounds that follow from lengths and rounding.")
    print(*found, sep="\n")
    later = [step for step in run.column("timing_s/step")[1:] if step is not None]
    if later:
        print(f"     seconds of a step, without the first: {sum(later) / len(later):.1f}")
    sys.exit(not all(line.holds for line in found))


if __name__ == "__main__":
    main()
