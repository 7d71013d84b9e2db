"""The share of a training step that trees shorten: given by the user, or measured by verl's timers."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.quoting import quoted_path
from tree_rl.inspection.files.run_log import read_log
from tree_rl.tree.report.counted import counted

ASSUMED = (0.2, 0.4, 0.6)
"""Shares if nothing is known. Stock verl with recorded agents had 0.67 in our run (docs/benchmarks)."""
STEP, UPDATE = "timing_s/step", "timing_s/update_actor"
SHORTENED = (UPDATE, *(f"timing_s/{name}" for name in ("old_log_prob", "ref", "values", "update_critic")))
"""verl's timers of forwards and backwards over rows."""
TREES = "tree/unique_tokens"
"""Metric that only runs with trees log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateShare:
    """Share of a step's seconds in passes over rows."""

    shares: tuple[float, ...]
    """Values in [0, 1], ascending; a single one if it is known."""
    source: str
    """Source of the values, in words."""

    @staticmethod
    def step_speed_up(update: float, share: float) -> float:
        """Speed-up of a whole step whose passes over rows speed up by the factor `update`: Amdahl's law."""
        return 1 / (1 - share + share / update)

    def __str__(self) -> str:
        return ", ".join(f"{share:.0%}" for share in self.shares)


def chosen_share(given: float | None, timing: Path | None) -> UpdateShare:
    """The given share, else that of the log `timing`, else the assumed one; an InputError if both are given."""
    if given is not None and timing is not None:
        raise InputError("--update-share and --timing: expected one of them, received both; drop one")
    if timing is not None:
        return _measured(timing)
    if given is not None:
        return UpdateShare(shares=(given,), source="--update-share")
    return UpdateShare(shares=ASSUMED, source="assumed; --update-share or --timing LOG tell yours")


def _measured(path: Path) -> UpdateShare:
    """The median over the steps of verl's console log, or of the jsonl of its `file` logger."""
    named, run = f"--timing {quoted_path(path)}", read_log(path)
    if run is not None and run.has(TREES):
        raise InputError(f"{named}: expected a run without trees, this one ran trees; name the log of a stock run")
    steps = [] if run is None else [step for step in run.metrics if step.get(STEP, 0.0) > 0 and UPDATE in step]
    shares = [sum(step.get(name, 0.0) for name in SHORTENED) / step[STEP] for step in steps]
    if not shares:
        raise InputError(
            f"{named}: expected verl's console log or the jsonl of its logger file, with {STEP} and {UPDATE}; "
            "found none"
        )
    # Timers of concurrent passes may overlap.
    share = min(median(shares), 1.0)
    return UpdateShare(shares=(share,), source=f"median of {counted(len(shares), 'step')} in {quoted_path(path)}")
