"""How much host memory a rank may use for tensors that wait for the backward."""

import os
from pathlib import Path

HOST_FRACTION = 0.8
"""Share of the available host memory; the rest is for checkpoints, rollouts and the file cache."""
MEMINFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")


def host_bytes_of_rank(local_ranks: int) -> float:
    """Bytes that each of a node's `local_ranks` ranks may use; 0 if the system does not report its memory."""
    return HOST_FRACTION * min(_available(), _left_in_group()) / local_ranks


def local_ranks(world: int, devices: int) -> int:
    """Ranks on this node: the launcher's environment variable, else one for each device."""
    launched = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("RAY_LOCAL_WORLD_SIZE")
    return max(1, int(launched) if launched else min(world, max(devices, 1)))


def _available() -> float:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return 0.0
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0.0)


def _left_in_group() -> float:
    """Bytes left under the container's memory limit."""
    try:
        most, now = (Path(GROUP, f"memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return float("inf")
    return float("inf") if most == "max" else max(float(most) - float(now), 0.0)
