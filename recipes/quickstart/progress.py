"""Runs one phase as a process of its own: its noise goes to a log file, its steps to one line each on the screen."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tree_rl.inspection.files.run_log import is_step, read_steps
from tree_rl.run_report.terminal import step_line

HEARTBEAT_SECONDS = 10.0
POLL_SECONDS = 0.25
TAIL_LINES = 30


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
    every: int = 1
    """Steps between two lines."""
    environment: Mapping[str, str] | None = None
    """Added to this process's environment."""
    seen_enough: Callable[[], bool] = lambda: False
    """Asked again and again; True ends the process, which counts as done."""


def run_phase(phase: Phase) -> float:
    """Run a phase to its end, show its progress, and return the seconds it took.

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
            done = _watch(process, phase, started)
        finally:
            _end(process)
    seconds = time.monotonic() - started
    if process.returncode != 0 and not done:
        raise PhaseFailedError(_failure(phase, process.returncode, seconds))
    say(phase.name, f"done in {seconds:.0f} s")
    return seconds


def say(name: str, text: str) -> None:
    """Print one line of a phase."""
    print(f"[{name:<7}] {text}", flush=True)


def _watch(process: subprocess.Popen[bytes], phase: Phase, started: float) -> bool:
    """Show a process's steps until it ends, takes too long or has shown enough; True for the last."""
    seen, last_sign = 0, started
    while True:
        running = process.poll() is None
        steps = read_steps(phase.metrics) if phase.metrics is not None else []
        for step, metrics in steps[seen:]:
            if is_step(metrics) and (step == 1 or step % phase.every == 0):
                say(phase.name, step_line(step, metrics))
                last_sign = time.monotonic()
        seen = len(steps)
        now = time.monotonic()
        if not running or now - started > phase.limit_seconds:
            return False
        if phase.seen_enough():
            return True
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
    tail = "\n".join(phase.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
    return f"{phase.name}: {reason} after {seconds:.0f} s. The end of {phase.log}:\n{tail}"


def fail(error: PhaseFailedError) -> None:
    """Print a failure and leave with exit code 1."""
    print(f"\nquickstart failed. {error}", file=sys.stderr, flush=True)
    raise SystemExit(1)
