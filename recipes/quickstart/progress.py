"""Runs one phase as a process of its own: its noise goes to a log file, its steps to one line each on the screen."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEARTBEAT_SECONDS = 10.0
POLL_SECONDS = 0.25
TAIL_LINES = 30

Metrics = Mapping[str, Any]


class PhaseFailedError(RuntimeError):
    """A phase's process failed; the message ends with the end of its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One process of the quickstart."""

    name: str
    """Shown in front of every line."""
    command: Sequence[str]
    """Program and arguments."""
    log: Path
    """Receives all output."""
    limit_seconds: float
    """Longer means that it hangs."""
    metrics: Path | None = None
    """File that verl's `file` logger writes; None when the phase has no steps."""
    describe: Callable[[int, Metrics], str | None] | None = None
    """Turns a step and its metrics into a line; None skips the step."""
    environment: Mapping[str, str] | None = None
    """Added to this process's environment."""
    cancelled: Callable[[], bool] = bool
    """Asked again and again; once true, the process is ended before its limit. Never true by default."""


def run_phase(phase: Phase) -> float:
    """Run a phase to its end and show its progress.

    Args:
        phase: What to run.

    Returns:
        Seconds it took.

    Raises:
        PhaseFailedError: it failed or ran past its limit.
    """
    phase.log.parent.mkdir(parents=True, exist_ok=True)
    if phase.metrics is not None:
        phase.metrics.unlink(missing_ok=True)
    started = time.monotonic()
    with phase.log.open("w") as log:
        process = subprocess.Popen(
            list(phase.command),
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(phase.environment or {})},
            start_new_session=True,
        )
        try:
            _watch(process, phase, started)
        finally:
            _end(process)
    seconds = time.monotonic() - started
    if process.returncode != 0:
        raise PhaseFailedError(_failure(phase, process.returncode, seconds))
    say(phase.name, f"done in {seconds:.0f} s")
    return seconds


def say(name: str, text: str) -> None:
    """Print one line of a phase."""
    print(f"[{name:<7}] {text}", flush=True)


def read_steps(metrics: Path) -> list[tuple[int, Metrics]]:
    """Read what verl's `file` logger has written; a line still being written is left out."""
    if not metrics.exists():
        return []
    lines = metrics.read_text().split("\n")[:-1]
    records = [json.loads(line) for line in lines]
    return [(record["step"], record["data"]) for record in records]


def reward_of_step(step: int, figures: Metrics) -> str | None:
    """A step of agents as a line, `describe` of a phase; None for steps without a reward, such as validation."""
    if "tree/session_score/mean" not in figures:
        return None
    return f"step {step:3d}  reward {figures['tree/session_score/mean']:.3f}  {figures['timing_s/step']:.1f} s"


def _watch(process: subprocess.Popen[bytes], phase: Phase, started: float) -> None:
    seen, last_sign = 0, started
    while True:
        running = process.poll() is None
        steps = read_steps(phase.metrics) if phase.metrics is not None else []
        for step, metrics in steps[seen:]:
            text = phase.describe(step, metrics) if phase.describe is not None else None
            if text is not None:
                say(phase.name, text)
                last_sign = time.monotonic()
        seen = len(steps)
        now = time.monotonic()
        if not running or now - started > phase.limit_seconds or phase.cancelled():
            return
        if now - last_sign > HEARTBEAT_SECONDS:
            doing = "starting" if phase.metrics is not None and not seen else "running"
            say(phase.name, f"{doing}, {now - started:.0f} s")
            last_sign = now
        time.sleep(POLL_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process with everything it started; a process that has ended by itself stays as it is."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _failure(phase: Phase, code: int, seconds: float) -> str:
    reason = f"ran past {phase.limit_seconds:.0f} s" if seconds > phase.limit_seconds else f"exit code {code}"
    if phase.cancelled():
        reason = "cancelled"
    tail = "\n".join(phase.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
    return f"{phase.name}: {reason} after {seconds:.0f} s. The end of {phase.log}:\n{tail}"


def fail(error: PhaseFailedError) -> None:
    """Print a failure and leave with exit code 1."""
    print(f"\nquickstart failed. {error}", file=sys.stderr, flush=True)
    raise SystemExit(1)
