"""Hostile and honest sessions at once: every honest one earns its reward, and nothing is left of any.

Usage: python storm.py HOSTILE HONEST, in a process of its own; prints figures as JSON.
"""

import asyncio
import contextlib
import gc
import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from attack_cases import AGENTS
from attack_worker import LIMITS, RESULTS, hostile_gateway
from hacks import Hack, all_hacks
from live_processes import own_descriptors
from small_swe import all_tasks

from tree_rl.rollout.sandbox import sandbox_folder
from tree_rl.rollout.sandbox.processes.processes import PROC
from tree_rl.rollout.sandbox.sandbox import SandboxOptions

KINDS = (
    *("a fork bomb", "a memory bomb", "memory in tmpfs", "a full disk", "thousands of files"),
    *("a thousand nested folders", "forty levels of long names", "names that no shell expects", "a command that hangs"),
    *("a hundred processes in the background", "a process that no signal ends", "a NUL in the command"),
    *("a surrogate in the command", "a command of 140 kB", "nothing can be read", "signals to everybody"),
    *("endless output", "stopped processes", "an import that eats memory", "an import that never ends"),
    *("a daemon of two forks", "tests swapped for a link, again and again", "a pipe in place of the source"),
)
HOSTILE_SECONDS, HONEST_SECONDS = 8.0, 600.0
USERS: set[int] = set()


async def round_of(hostile: int, honest: int) -> dict[str, Any]:
    """Play so many of each at once. Returns rewards of the honest, and how the hostile ended."""
    hacks, tasks = all_hacks(), [task for _, task in sorted(all_tasks().items())]
    kinds = [KINDS[number % len(KINDS)] for number in range(hostile)]
    # Many wait for few cores: an honest command may wait long, which is no fault of its own.
    patient = SandboxOptions(limits=replace(LIMITS, timeout_seconds=HONEST_SECONDS, cpu_seconds=60))
    short = SandboxOptions(limits=replace(LIMITS, timeout_seconds=5))
    async with hostile_gateway() as play:

        async def session(number: int, hack: Hack, options: SandboxOptions) -> tuple[float | None, str]:
            task, agent, is_honest = tasks[number % len(tasks)], AGENTS[number % len(AGENTS)], options is patient
            seconds = HONEST_SECONDS if is_honest else HOSTILE_SECONDS
            done, output = await play(agent, task, hack.command(task, repaired=is_honest), options, seconds)
            return done.reward, f"{task.instance_id}: {done.status}: {done.detail[-300:]} {output[-300:]}"

        working = [session(number, Hack(), patient) for number in range(honest)]
        attacking = [session(number, hacks[kind], short) for number, kind in enumerate(kinds)]
        played = await asyncio.gather(*working, *attacking)
    honest_ends, hostile_ends = played[:honest], played[honest:]
    paid_or_lost = [f"{kind}: {end}" for kind, end in zip(kinds, hostile_ends, strict=True) if end[0] != 0.0]
    return {
        "honest": dict(Counter(str(reward) for reward, _ in honest_ends)),
        "hostile": dict(Counter(str(reward) for reward, _ in hostile_ends)),
        "faults": [said for reward, said in honest_ends if reward != 1.0] + paid_or_lost,
    }


def figures() -> dict[str, int]:
    """What this process and its sandboxes hold."""
    gc.collect()
    return {
        "descriptors": len(own_descriptors()),
        "child_processes": len([status for status in statuses() if status.get("PPid") == str(os.getpid())]),
        "processes_of_command_users": len([status for status in statuses() if is_of_command_user(status)]),
        "folders": len([path for path in Path(tempfile.gettempdir()).iterdir() if path.name.startswith("tree-rl")]),
    }


def is_of_command_user(status: dict[str, str]) -> bool:
    """Whether a sandbox of this process had the user; other tests have sandboxes too."""
    # A dead one waits for the machine's init, which is not ours to hurry.
    return bool(USERS & {int(word) for word in status["Uid"].split()}) and status["State"][0] != "Z"


def noting_users() -> Any:
    """Notes the user of every sandbox."""
    right = sandbox_folder.own_user

    def own_user() -> Any:
        made = right()
        USERS.update(() if made is None else (made.user_id,))
        return made

    return mock.patch.object(sandbox_folder, "own_user", own_user)


def statuses() -> list[dict[str, str]]:
    """/proc/PID/status of all processes, zombies too."""
    found = []
    for entry in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            lines = (entry / "status").read_text(errors="replace").splitlines()
            found.append({name: value.strip() for name, _, value in (line.partition(":") for line in lines)})
    return found


def main() -> None:
    """A storm to warm up caches, the storm, and as many sessions again."""
    hostile, honest = (int(word) for word in sys.argv[1:])
    with noting_users():
        asyncio.run(round_of(hostile, honest))
        before = figures()
        storm = asyncio.run(round_of(hostile, honest))
        after = figures()
        again = asyncio.run(round_of(0, honest))
    # What must not be: an honest session without its reward, a hostile one with one or lost, anything left.
    grown = [
        f"{name}: {after[name]}, before the storm {number}" for name, number in before.items() if after[name] > number
    ]
    faults = [*storm["faults"], *again["faults"], *grown]
    line = {"before": before, "storm": storm, "after": after, "again": again, "faults": faults}
    os.write(RESULTS, f"{json.dumps(line)}\n".encode())


if __name__ == "__main__":
    main()
