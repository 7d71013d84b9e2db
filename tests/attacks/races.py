"""Races of a session against its judge and against the trainer's hands in its folder.

Usage: python races.py TIMEOUTS WRITES, in a process of its own; prints what was tried and what was won, as JSON.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread
from typing import Any

from attack_cases import AGENTS
from attack_worker import LIMITS, RESULTS, hostile_gateway
from hacks_in_processes import HACKS
from judged_tasks import UNITTEST
from live_processes import command_lines
from small_swe import all_tasks

from tree_rl.rollout.sandbox.sandbox import SandboxOptions
from tree_rl.rollout.sandbox.sandbox_folder import SandboxFolder

MARK = "86231.5"
"""Seconds that a left-over process would sleep, which tells it from others."""
SECRET = "the trainer's own"
SWAPS = """
import ctypes, os, sys
libc, outside = ctypes.CDLL(None), sys.argv[1].encode()
os.makedirs("link.d", exist_ok=True); os.makedirs("tests/deep/a", exist_ok=True)
for name in (b"l1", b"l2", b"l3"):
    if not os.path.lexists(name): os.symlink(outside, name)
if not os.path.lexists("file"): os.symlink(outside + b"/secret", "file")
open("started", "w").close()
while True:
    for inside, link in ((b"tests", b"l1"), (b"tests/deep", b"l2"), (b"tests/deep/t.py", b"file"), (b"many", b"l3")):
        libc.renameat2(-100, inside, -100, link, 2)
        libc.renameat2(-100, inside, -100, link, 2)
"""
"""Exchanges folders and files of the repository for links that lead out, as fast as the kernel can."""


async def timeout_races(number: int) -> dict[str, int]:
    """Sessions cut off at many moments while commands run, start and wait: none is scored beside a live process.

    Returns:
        tried; won: rewards; lost: sessions without a reward; alive: processes seen when the reward was there.
    """
    tasks = [all_tasks()["lru_cache"], UNITTEST]
    overwrite = HACKS["a process that waits for the tests"].shell
    forks = f"(while :; do sleep {MARK} & sleep 0.01; done) 2>/dev/null &"
    command = f"{overwrite}{forks} while :; do {overwrite}sleep 0.05; done"
    counts = {"tried": 0, "won": 0, "lost": 0, "alive": 0}
    async with hostile_gateway() as play:
        room, options = asyncio.Semaphore(4), SandboxOptions(limits=LIMITS)

        async def race(at: int) -> None:
            agent, seconds = AGENTS[at % len(AGENTS)], 0.2 + 0.037 * (at % 50)
            async with room:
                done, _ = await play(agent, tasks[at % 2], f": race {at}; {command}", options, seconds)
            alive = sum(f"race {at};" in line for line in command_lines())
            counts["tried"] += 1
            counts["won"] += done.reward not in (0.0, None)
            counts["lost"] += done.reward is None
            counts["alive"] += alive

        await asyncio.gather(*map(race, range(number)))
    counts["alive"] += sum(MARK in line for line in command_lines())
    return counts


def write_races(number: int) -> dict[str, int]:
    """The trainer writes, reads and removes while a command exchanges every path for a link to a folder outside.

    Returns:
        tried; won: files outside that were written, owned or removed, or read into the session.
    """
    counts = {"tried": 0, "won": 0}
    with tempfile.TemporaryDirectory() as made:
        outside = Path(made)
        outside.chmod(0o777)
        for round_number in range(max(1, number // 25)):
            (outside / "deep" / "a").mkdir(parents=True, exist_ok=True)
            (outside / "secret").write_text(SECRET)
            before = listing(outside)
            sandbox = SandboxFolder({"tests/deep/t.py": "x", "many/a/b/c": "x", "swap.py": SWAPS}, limits=LIMITS)
            swapping = Thread(target=sandbox.run, args=(f"python3 swap.py {outside}",))
            swapping.start()
            while sandbox.read("started") is None:
                time.sleep(0.01)
            for at in range(min(number, 25)):
                counts["tried"] += 1
                # The trainer meets the exchanges at every phase.
                time.sleep(0.0007 * (at % 7))
                try:
                    sandbox.write("tests/deep/t.py", "overwritten")
                    sandbox.write(f"tests/deep/a/n{at}.py", "made")
                    counts["won"] += SECRET in (sandbox.read("tests/deep/t.py") or "")
                except ValueError:
                    continue
            if round_number % 2:
                sandbox.stop()
            # Without a stop the removal races with the command as well.
            sandbox.close()
            swapping.join()
            counts["won"] += listing(outside) != before
    return counts


def listing(folder: Path) -> dict[str, tuple[int, int, str]]:
    """What is in a folder: owner, mode and content by path."""
    return {
        str(path): (path.lstat().st_uid, path.lstat().st_mode, path.read_text() if path.is_file() else "")
        for path in sorted(folder.rglob("*"))
    }


def main() -> None:
    timeouts, writes = (int(word) for word in sys.argv[1:])
    result: dict[str, Any] = {"timeouts": asyncio.run(timeout_races(timeouts)), "writes": write_races(writes)}
    result["faults"] = [
        f"{kind}.{name}={count}"
        for kind, counts in result.items()
        for name, count in counts.items()
        if count and name != "tried"
    ]
    os.write(RESULTS, f"{json.dumps(result)}\n".encode())


if __name__ == "__main__":
    main()
