"""Sessions cancelled at any moment, also twice: no process, folder, user, thread, descriptor or task stays."""

import asyncio
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

from live_processes import own_descriptors, running
from sandboxes_here import HERE
from small_swe import all_tasks, work_on, writing

from tree_rl.rollout.agents.in_environment import FinishedTask
from tree_rl.rollout.environments import Outcome
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.gateway.endpoint import Endpoint
from tree_rl.rollout.sandbox.local_sandbox import LocalSandbox

SESSIONS = int(os.environ.get("TREE_RL_CANCELLATIONS", "8"))
"""TREE_RL_CANCELLATIONS=100 runs the full number."""
AT_ONCE = 8
LONGEST_SECONDS = 2.5
"""An undisturbed session takes about as long here."""
MARK = "61.73"
TASK = all_tasks()["lru_cache"]
REPAIR = writing(dict(TASK.solution_files))


class Repairing:
    """An agent that leaves a process, repairs the task, and ends."""

    async def run(self, messages: Any, *, environment: Any, endpoint: Endpoint) -> Outcome:
        await asyncio.gather(environment.run(f"(setsid sleep {MARK} &) ; sleep 0.2"), environment.run(REPAIR))
        return Outcome(answer="", turns=1, malformed_calls=0, is_complete=True)


async def session() -> FinishedTask:
    endpoint = Endpoint(url="http://127.0.0.1:1", token="t", model="m")
    return await work_on(TASK, agent=Repairing(), environment=SweEnvironment(HERE), endpoint=endpoint)


def users_held() -> int:
    """Users that this process holds; other processes of the tests hold theirs."""
    own = set(own_descriptors())
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return sum(fields[-1].startswith("@tree-rl-command-user-") and f"socket:[{fields[6]}]" in own for fields in sockets)


def left() -> tuple[int, int, int]:
    """Threads of sandboxes, descriptors, and tasks beside this one."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("sandbox")]
    return len(threads), len(own_descriptors()), len(asyncio.all_tasks()) - 1


def grown(before: tuple[int, int, int]) -> bool:
    return any(now > then for now, then in zip(left(), before, strict=True))


async def cancelled_at_random(source: random.Random) -> None:
    running = asyncio.create_task(session())
    for _ in range(source.choice((1, 1, 2, 3))):
        # Half of them in the short phases: the start, or what follows the first cancellation.
        await asyncio.sleep(source.uniform(0, source.choice((0.1, LONGEST_SECONDS))))
        running.cancel()
    await asyncio.wait({running})
    assert running.cancelled() or running.result().reward == 1.0


async def test_sessions_cancelled_at_random_moments_leave_nothing(temporary: Path) -> None:
    users = users_held()
    done = await session()
    assert (done.status, done.reward) == ("completed", 1.0), done
    before = left()
    for number in range(0, SESSIONS, AT_ONCE):
        sources = [random.Random(number + index) for index in range(min(AT_ONCE, SESSIONS - number))]
        await asyncio.gather(*map(cancelled_at_random, sources))
        assert not list(temporary.iterdir())
    deadline = time.monotonic() + 10
    while grown(before) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert not grown(before), (before, left())
    assert [done.reward for done in await asyncio.gather(session(), session())] == [1.0, 1.0]
    assert not running(MARK)
    assert not list(temporary.iterdir())
    assert users_held() <= users


async def test_a_cancelled_clean_up_goes_to_its_end(temporary: Path) -> None:
    sandbox = LocalSandbox(HERE)
    await sandbox.start()
    (place,) = temporary.glob("tree-rl-owned-*/files")
    for number in range(3000):
        (place / f"{number}").mkdir()
    running = asyncio.create_task(sandbox.close())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for _ in range(3):
        running.cancel()
        await asyncio.sleep(0.001)
    await asyncio.wait({running})
    assert not list(temporary.iterdir())
