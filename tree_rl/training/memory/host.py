"""How much host memory a rank may fill with what waits for its backward."""

import os
from pathlib import Path

HOST_FRACTION = 0.8
"""Share of what is available now; the rest is for checkpoints, rollouts and the file cache."""
MEMINFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")


def host_bytes_of_rank(local_ranks: int) -> float:
    """Bytes that each of a node's ranks may take; 0 where the system does not tell.

    Args:
        local_ranks: ranks that share the node's memory.
    """
    return HOST_FRACTION * min(_available(), _left_in_group()) / local_ranks


def local_ranks(world: int, devices: int) -> int:
    """Ranks on this node: what the launcher says, or one for each device."""
    told = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("RAY_LOCAL_WORLD_SIZE")
    return max(1, int(told) if told else min(world, max(devices, 1)))


def _available() -> float:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return 0.0
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0.0)


def _left_in_group() -> float:
    """What a container may still take."""
    try:
        most, now = (Path(GROUP, f"memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return float("inf")
    return float("inf") if most == "max" else max(float(most) - float(now), 0.0)
