"""Benchmarks of several GPUs, run by as many CPU processes on a tiny model."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_ranks(script: str, processes: int, *flags: object) -> str:
    """What rank 0 printed; a failing rank fails the test."""
    path = ROOT / "benchmarks" / script
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*launch, str(path), *map(str, flags)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
