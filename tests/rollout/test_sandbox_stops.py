"""When a sandbox has stopped, nothing that its commands started lives, and no call of it is under way."""

import asyncio
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from live_processes import running, wait_for
from sandboxes_here import needs_bubblewrap, started

from tree_rl.rollout.sandbox.errors import SandboxDied
from tree_rl.rollout.sandbox.local_sandbox import LocalSandbox
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.sandbox import SandboxOptions
from tree_rl.rollout.sandbox.sandbox_folder import SandboxFolder, command_threads

IS_ROOT = os.geteuid() == 0
pytestmark = needs_bubblewrap
PATIENT = Limits(timeout_seconds=120, cpu_seconds=60)
HIDE = {
    "in the foreground": "sleep {}",
    "in the background": "sleep {} & sleep {}",
    "a session of its own": "setsid sleep {} >/dev/null 2>&1 & sleep {}",
    "twice forked": "(setsid sh -c 'sleep {} & sleep {} &' </dev/null >/dev/null 2>&1 &); sleep {}",
    "elsewhere, without variables": "(cd /; env -i setsid sh -c 'sleep {} & sleep {}' >/dev/null 2>&1 &); sleep {}",
    "deaf": "trap '' TERM HUP INT; (trap '' TERM HUP; setsid nohup sleep {} >/dev/null 2>&1 &); sleep {}",
    "stopped": "(setsid sh -c 'kill -STOP $$; sleep {}' &); sleep {}",
}


@pytest.fixture
def seconds() -> str:
    """A time that tells these sleeps from all others."""
    return f"500.{time.monotonic_ns()}"


@pytest.mark.parametrize("hide", HIDE.values(), ids=HIDE)
def test_stop_returns_when_everything_is_dead(hide: str, seconds: str) -> None:
    with ThreadPoolExecutor() as pool, closing(SandboxFolder(limits=PATIENT)) as sandbox:
        command = pool.submit(sandbox.run, hide.replace("{}", seconds))
        wait_for(lambda: running(f"sleep {seconds}"))
        time.sleep(0.1)
        sandbox.stop()
        # At once: nobody waits for a process that is still dying.
        assert running(f"sleep {seconds}") == []
        assert command.result(timeout=30).exit_code != 0
        with pytest.raises(SandboxDied, match="stopped"):
            sandbox.run("true")
        with pytest.raises(SandboxDied, match="stopped"):
            sandbox.write("a", "b")
        sandbox.stop()


@pytest.mark.parametrize("hide", HIDE.values(), ids=HIDE)
def test_a_command_that_returns_leaves_nothing(hide: str, seconds: str) -> None:
    command = hide.rpartition("sleep {}")[0] or "sleep {} & "
    with closing(SandboxFolder(limits=PATIENT)) as sandbox:
        result = sandbox.run(f"{command} echo done".replace("{}", seconds))
        assert running(f"sleep {seconds}") == [], result
        assert not result.timed_out


def test_a_process_that_forks_and_exits_again_and_again_ends_with_its_command() -> None:
    """Who looks for it sees a process that is gone when looked at, and not yet the next one."""
    hop = "import os\nfor _ in range(20000):\n    os.write(1, b'.')\n    if os.fork(): os._exit(0)\n"
    with closing(SandboxFolder({"hop.py": hop}, limits=PATIENT)) as sandbox:
        result = sandbox.run("(setsid python3 -S hop.py >hops 2>&1 &); until [ -s hops ]; do :; done")
        hops = sandbox.directory / "hops"
        assert hops.exists(), result
        before = hops.stat().st_size
        time.sleep(0.1)
        assert hops.stat().st_size == before


async def test_a_queued_command_never_starts(tmp_path: Path) -> None:
    """More calls than threads: those that wait in the queue must not start after the stop."""
    async with started(LocalSandbox(SandboxOptions(limits=PATIENT))) as sandbox:
        number = 3 * command_threads()._max_workers
        calls = [asyncio.create_task(sandbox.run(f"echo > begun{i}; sleep 600")) for i in range(number)]
        await asyncio.sleep(0.5)
        await sandbox.stop()
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(one, SandboxDied) for one in done) >= number - command_threads()._max_workers
        begun = len(list(sandbox._folder.directory.iterdir()))  # type: ignore[attr-defined]
        assert begun <= command_threads()._max_workers


@pytest.mark.parametrize("number", range(0, 10, 3))
async def test_a_stop_after_a_time_out_waits_and_the_judge_has_another_folder_and_user(number: int) -> None:
    """The agent writes again and again; after the stop the file never changes."""
    async with started(LocalSandbox(SandboxOptions(limits=PATIENT))) as sandbox:
        racing = "i=0; while :; do i=$((i+1)); echo $i > count; (setsid sh -c 'echo $i > late' &); done"
        calling = asyncio.create_task(sandbox.run(racing))
        while await sandbox.read("late") is None:
            await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.03 * number):
                await calling
        await asyncio.gather(sandbox.stop(), sandbox.stop())
        assert not sandbox._calls
        before = await sandbox.read("count"), await sandbox.read("late")
        await asyncio.sleep(0.2)
        assert (await sandbox.read("count"), await sandbox.read("late")) == before
        async with started(sandbox.fresh()) as judge:
            own, fresh = sandbox._folder, judge._folder  # type: ignore[attr-defined]
            assert own and fresh and own.directory != fresh.directory
            assert not IS_ROOT or own._user_id != fresh._user_id == fresh.directory.stat().st_uid
            await sandbox.copy_to(judge, leave_out=lambda path: path == "late")
            assert (await judge.run("ls -A; cat count")).output == f"count\n{before[0]}"


async def test_stop_and_close_work_before_a_start_and_during_one() -> None:
    unstarted = LocalSandbox(SandboxOptions(limits=PATIENT))
    await unstarted.stop()
    await unstarted.close()
    cancelled = LocalSandbox(SandboxOptions(limits=PATIENT))
    starting = asyncio.create_task(cancelled.start())
    await asyncio.sleep(0)
    starting.cancel()
    await cancelled.close()
    assert cancelled._folder is None or not cancelled._folder.directory.exists()


@pytest.mark.skipif(not IS_ROOT, reason="only root gives a sandbox a user of its own")
def test_no_two_living_sandboxes_share_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tree_rl.rollout.sandbox.processes.users.command_users", lambda: range(1 << 20, (1 << 20) + 3))
    first = [SandboxFolder() for _ in range(3)]
    assert len({sandbox._user_id for sandbox in first}) == 3
    with pytest.raises(OSError, match="all taken"):
        SandboxFolder()
    # Another process sees what is taken, too.
    program = f"from tree_rl.rollout.sandbox.processes.users import CommandUser\nCommandUser({first[0]._user_id})"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "Address already in use" in other.stderr
    first[0].close()
    with closing(SandboxFolder()) as again:
        assert again._user_id == first[0]._user_id
    for sandbox in first:
        sandbox.close()
