"""Hostile and honest sessions at once: every honest one earns its reward, and nothing is left of any.

Usage: python storm.py HOSTILE HONEST, in a process of its own; prints figures as JSON.
"""

import asyncio
import gc
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from attack_worker import LIMITS, RESULTS, hostile_gateway, play_session
from hacks import Hack, all_hacks
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


async def round_of(hostile: int, honest: int, waiting_seconds: float) -> dict[str, Any]:
    """Play so many of each at once. Returns rewards of the honest, and how the hostile ended."""
    hacks, tasks = all_hacks(), all_tasks()
    names = sorted(tasks)
    # Many wait for few cores: an honest command may wait long, which is no fault of its own.
    patient = SandboxOptions(limits=replace(LIMITS, timeout_seconds=waiting_seconds, cpu_seconds=60))
    short = SandboxOptions(limits=replace(LIMITS, timeout_seconds=5))
    async with hostile_gateway() as (gateway, model):

        async def attack(number: int) -> tuple[str, float | None, str]:
            task, kind = tasks[names[number % len(names)]], KINDS[number % len(KINDS)]
            done, _ = await play_session(
                gateway,
                model,
                agent=("react", "command_line", "mini_swe")[number % 3],
                task=task,
                command=hacks[kind].command(task, repaired=False),
                options=short,
                seconds=HOSTILE_SECONDS,
            )
            return kind, done.reward, f"{done.status}: {done.detail}"

        async def work(number: int) -> tuple[float | None, str]:
            task = tasks[names[number % len(names)]]
            done, output = await play_session(
                gateway,
                model,
                agent=("react", "command_line", "mini_swe")[number % 3],
                task=task,
                command=Hack().command(task, repaired=True),
                options=patient,
                seconds=HONEST_SECONDS,
            )
            return done.reward, f"{task.instance_id}: {done.status}: {done.detail} {output[-300:]}"

        played = await asyncio.gather(*[work(n) for n in range(honest)], *[attack(n) for n in range(hostile)])
    honest_ends, hostile_ends = played[:honest], played[honest:]
    return {
        "honest": dict(Counter(str(end[0]) for end in honest_ends)),
        "hostile": dict(Counter(str(end[1]) for end in hostile_ends)),
        "faults": [end[1] for end in honest_ends if end[0] != 1.0]
        + [f"{end[0]}: {end[1]} {end[2][-300:]}" for end in hostile_ends if end[1] != 0.0],
    }


def figures() -> dict[str, int]:
    """What this process and its sandboxes hold."""
    gc.collect()
    descriptors = [
        os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if alive_descriptor(name)
    ]
    return {
        "descriptors": len(descriptors),
        "listening_ports": listening_ports({name for name in descriptors if name.startswith("socket:")}),
        "child_processes": len(list(children())),
        "processes_of_command_users": len(list(processes_of_command_users())),
        "folders": len([path for path in Path(tempfile.gettempdir()).iterdir() if path.name.startswith("tree-rl")]),
    }


def alive_descriptor(name: str) -> bool:
    """Whether it still is one: the one that lists them is not."""
    try:
        os.fstat(int(name))
    except OSError:
        return False
    return True


def listening_ports(sockets: set[str]) -> int:
    """How many of these sockets listen for TCP."""
    rows = [line.split() for table in ("tcp", "tcp6") for line in (PROC / "net" / table).read_text().splitlines()[1:]]
    return sum(row[3] == "0A" and f"socket:[{row[9]}]" in sockets for row in rows)


def children() -> list[int]:
    """Processes, zombies too, that this one started."""
    return [pid for pid, status in statuses().items() if status.get("PPid") == str(os.getpid())]


def processes_of_command_users() -> list[int]:
    """Processes of users that sandboxes of this process had; other tests have sandboxes too."""
    return [
        pid
        for pid, status in statuses().items()
        # A dead one waits for the machine's init, which is not ours to hurry.
        if USERS & {int(word) for word in status["Uid"].split()} and status["State"][0] != "Z"
    ]


def noting_users() -> Any:
    """Notes the user of every sandbox."""
    right = sandbox_folder.own_user

    def own_user() -> Any:
        made = right()
        USERS.update(() if made is None else (made.user_id,))
        return made

    return mock.patch.object(sandbox_folder, "own_user", own_user)


def statuses() -> dict[int, dict[str, str]]:
    """/proc/PID/status of all processes."""
    found = {}
    for entry in PROC.glob("[0-9]*"):
        try:
            lines = (entry / "status").read_text(errors="replace").splitlines()
        except OSError:
            continue
        found[int(entry.name)] = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return found


def faults_of(
    before: Mapping[str, int], storm: Mapping[str, Any], after: Mapping[str, int], again: Mapping[str, Any]
) -> list[str]:
    """What must not be: an honest session without its reward, a hostile one with one or lost, anything left."""
    faults = [*storm["faults"], *again["faults"]]
    for name, value in after.items():
        if value > before[name]:
            faults.append(f"{name}: {value}, before the storm {before[name]}")
    return faults


def main() -> None:
    """A storm to warm up caches, the storm, and as many sessions again."""
    hostile, honest = (int(word) for word in sys.argv[1:])
    with noting_users():
        asyncio.run(round_of(hostile, honest, HONEST_SECONDS))
        before = figures()
        storm = asyncio.run(round_of(hostile, honest, HONEST_SECONDS))
        after = figures()
        again = asyncio.run(round_of(0, honest, HONEST_SECONDS))
    rounds = {"before": before, "storm": storm, "after": after, "again": again}
    line = {**rounds, "faults": faults_of(**rounds)}
    os.write(RESULTS, f"{json.dumps(line)}\n".encode())


if __name__ == "__main__":
    main()
