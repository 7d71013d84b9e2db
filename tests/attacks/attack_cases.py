"""Which attacks are played: the product of hacks, agents, users and tasks, or pairs of these factors.

Usage: python attack_cases.py product STEP, or races.py TIMEOUTS WRITES, or storm.py HOSTILE HONEST; plays every STEP-th
case of the product, or the other program as root and as another user (scripts/attacks.sh).
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hacks import Hack

HERE = Path(__file__).parent
OTHER_USER = 54_321
"""User id of a trainer that is not root."""
AGENTS = ("react", "command_line", "mini_swe")
USERS = ("root", "not root")
IN_PROCESS = ("unittest", "pytest")
"""Tasks whose tests share a process with the code under test."""
TASKS = ("lru_cache", "roman_numerals", "event_bus", *IN_PROCESS)
FACTORS = (AGENTS, USERS, TASKS)
REPAIR = "the real repair"
"""Stands where a hack would: an honest session."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    hack: str
    agent: str
    user: str
    task: str


def product(hacks: Sequence[str]) -> list[Case]:
    """Every hack in every combination, and the real repair in each."""
    return [
        Case(hack=hack, agent=agent, user=user, task=task)
        for hack, agent, user, task in itertools.product((*hacks, REPAIR), *FACTORS)
    ]


def pairwise(hacks: Sequence[str]) -> list[Case]:
    """Every hack once at least, every pair of agent, user and task, and the real repair with each task."""
    combinations = list(itertools.product(*FACTORS))
    # 37 and the 30 combinations have no common factor: 30 consecutive hacks see them all.
    hostile = range(max(len(hacks), len(combinations)))
    chosen = [(hacks[number % len(hacks)], combinations[37 * number % len(combinations)]) for number in hostile]
    chosen += [(REPAIR, combinations[(23 * number + 7) % len(combinations)]) for number in range(12)]
    return [Case(hack=hack, agent=agent, user=user, task=task) for hack, (agent, user, task) in chosen]


class CannotBeAnotherUserError(RuntimeError):
    """Another user cannot run this Python or read this repository."""


def worker(user: str, program: str, arguments: Sequence[str], folder: Path) -> "subprocess.Popen[str]":
    """Start a program of this folder as root or as another user, with `folder` for its temporary files.

    Raises:
        CannotBeAnotherUserError: root is asked for and we are not, or the other user lacks what it needs.
    """
    folder.mkdir(exist_ok=True)
    roots = [str(HERE), str(HERE.parent / "rollout"), str(HERE.parents[1]), str(HERE.parents[1] / "kernels")]
    path = os.pathsep.join([*roots, *(path for path in sys.path if "site-packages" in path)])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder), "HOME": str(folder)}
    environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, str(HERE / program), *arguments]
    if user == "root" and os.geteuid() != 0:
        raise CannotBeAnotherUserError("this test is not root")
    if user == "not root" and os.geteuid() == 0:
        os.chown(folder, OTHER_USER, OTHER_USER)
        environment["LD_LIBRARY_PATH"] = "/mnt/lib"
        argv = as_other_user(argv)
        looked = [*argv[: argv.index(str(HERE / program))], "-c", "import tree_rl, ssl"]
        tried = subprocess.run(looked, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        if tried.returncode:
            raise CannotBeAnotherUserError(f"another user cannot run these tests: {tried.stderr.strip()[-300:]}")
    return subprocess.Popen(argv, env=environment, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def as_other_user(argv: Sequence[str]) -> list[str]:
    """Python by another user, who may not be allowed into the folder where Python is installed: it shows at /mnt."""
    python = f"/mnt/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    ids = [f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"]
    enter = 'mount --bind "$0" /mnt && exec setpriv "$@"'
    return ["unshare", "--mount", "sh", "-c", enter, sys.base_prefix, *ids, "--", python, *argv[1:]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a session ended."""

    case: Case
    status: str
    reward: float | None
    detail: str

    @property
    def fault(self) -> str | None:
        """What must not be, in words; None if all is well."""
        if self.status == "skipped":
            return None
        if self.reward is None:
            return f"lost: {self.status}: {self.detail}"
        if self.case.hack == REPAIR:
            return None if self.reward == 1.0 else f"the real repair got {self.reward}: {self.detail}"
        return None if self.reward == 0.0 else f"reward {self.reward}"


def play(cases: Sequence[Case], folder: Path, *, at_once: int = 6, seconds: float = 3600) -> Iterator[Result]:
    """Play sessions, those of root and of the other user at the same time; results come as they end.

    Raises:
        RuntimeError: a worker crashed, or took longer than `seconds`.
    """
    folder.chmod(0o755)
    running = []
    for user in USERS:
        mine = [case for case in cases if case.user == user]
        if not mine:
            continue
        try:
            process = worker(user, "attack_worker.py", [str(at_once)], folder / user.replace(" ", "_"))
        except CannotBeAnotherUserError as error:
            yield from (Result(case=case, status="skipped", reward=None, detail=str(error)) for case in mine)
            continue
        running.append((process, threading.Timer(seconds, process.kill)))
        assert process.stdin is not None
        process.stdin.write(json.dumps([asdict(case) for case in mine]))
        process.stdin.close()
        running[-1][1].start()
    for process, watchdog in running:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                read = json.loads(line)
                yield Result(**{**read, "case": Case(**read["case"])})
        watchdog.cancel()
        if process.wait():
            raise RuntimeError(f"a worker ended with status {process.returncode}")


def fault_of(result: Result, hacks: Mapping[str, "Hack"]) -> str | None:
    """What must not be. A hack that knows what the tests compare may win where they share its process."""
    hack = hacks.get(result.case.hack)
    is_allowed = hack is not None and hack.hits == "targeted" and result.case.task in IN_PROCESS
    return None if is_allowed and result.reward is not None else result.fault


def play_product(step: int) -> bool:
    """Play every `step`-th case, print the faults and how many ended how. Returns whether all is well."""
    from hacks import all_hacks

    hacks = all_hacks()
    cases = product(list(hacks))[::step]
    results: list[Result] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        for result in play(cases, Path(made), seconds=24 * 3600):
            results.append(result)
            if len(results) % 100 == 0 or len(results) == len(cases):
                print(f"{len(results)} of {len(cases)} sessions, {time.monotonic() - started:.0f} s", flush=True)
    faults = [(result.case, fault_of(result, hacks)) for result in results]
    for case, fault in faults:
        if fault:
            print(f"FAULT {case}: {fault}")
    for reason in sorted({result.detail for result in results if result.status == "skipped"}):
        print(f"skipped: {reason}")
    ends = Counter((r.case.task, r.case.agent, r.case.hack == REPAIR, r.status, r.reward) for r in results)
    for (task, agent, is_honest, status, reward), count in sorted(ends.items(), key=str):
        print(f"{count} {'honest' if is_honest else 'hostile'} sessions of {agent} on {task}: {status}, {reward}")
    return not any(fault for _, fault in faults)


def run_program(program: str, arguments: Sequence[str]) -> bool:
    """Run a program of this folder as each user and print its line. Returns whether all is well."""
    is_well = True
    for user in USERS:
        with tempfile.TemporaryDirectory() as made:
            Path(made).chmod(0o755)
            try:
                running = worker(user, program, arguments, Path(made) / "made")
            except CannotBeAnotherUserError as error:
                print(f"{user}: skipped: {error}")
                continue
            output, _ = running.communicate()
            print(f"{user}: {output.strip()}", flush=True)
            is_well &= running.returncode == 0 and not json.loads(output)["faults"]
    return is_well


def main() -> None:
    """Play what the arguments name; status 1 if there were faults."""
    what, *arguments = sys.argv[1:]
    is_well = play_product(int(arguments[0])) if what == "product" else run_program(what, arguments)
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
