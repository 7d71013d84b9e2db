"""Runs a command in a Ray cluster of its own, whose job has a number that clusters beside it do not use.

verl names the sockets by which weights reach vLLM after the number of the Ray job: of two clusters on one machine, each
with a first job, one would read the other's weights. Usage:

python benchmarks/swe_learning_arm.py --number 2 --cpus 16 --gpus 1 -- COMMAND ...
"""

import argparse
import os
import signal
import subprocess
import sys
from types import FrameType

import ray
from ray._private.state import next_job_id

STORE_BYTES = 2 << 30


def leave(number: int, frame: FrameType | None) -> None:
    """Let `finally` stop the cluster when this process is told to end."""
    raise SystemExit(128 + number)


def main() -> int:
    """Start the cluster, run the command as its next job, stop the cluster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=0, help="unlike those of clusters that run at the same time")
    parser.add_argument("--cpus", type=int, default=24, help="logical processors that Ray may lend")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--cores", type=int, nargs="*", default=(), help="of the machine; all by default")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    if arguments.cores:
        os.sched_setaffinity(0, arguments.cores)
    signal.signal(signal.SIGTERM, leave)
    context = ray.init(
        num_cpus=arguments.cpus,
        num_gpus=arguments.gpus,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
    )
    for _ in range(arguments.number):
        next_job_id()
    try:
        address = context.address_info["gcs_address"]
        print(f"ray runs at {address}, logs in {context.address_info['session_dir']}", flush=True)
        return subprocess.run(arguments.command, env=os.environ | {"RAY_ADDRESS": address}, check=False).returncode
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
