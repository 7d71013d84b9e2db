"""Laws of a sandbox, whichever back end runs it: bubblewrap here, nothing, or SWE-ReX behind its server."""

import asyncio
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_processes import wait_for, wait_until_gone
from sandboxes_here import BOTH, HERE, started

from tree_rl.rollout.sandbox.open_sandbox import open_sandbox
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.sandbox import Sandbox, SandboxDied, SandboxError, SandboxOptions

LIMITS = Limits(
    timeout_seconds=60, cpu_seconds=5, output_bytes=5000, file_bytes=20 << 20, memory_bytes=1 << 30, processes=40
)


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, Any]]:
    """SWE-ReX's own server, as it runs inside a container."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    token = secrets.token_hex(8)
    program = Path(sys.executable).with_name("swerex-remote")
    command = [program, "--auth-token", token, "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def answers() -> bool:
        assert process.poll() is None
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_for(answers)
        yield {"host": "http://127.0.0.1", "port": port, "auth_token": token, "timeout": 5.0}
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=[*BOTH, "remote"])
def options(request: pytest.FixtureRequest) -> SandboxOptions:
    if request.param == "remote":
        return SandboxOptions(backend="remote", limits=LIMITS, arguments=request.getfixturevalue("server"))
    return SandboxOptions(limits=LIMITS, unconfined=request.param)


def opened(options: SandboxOptions, folder: Path | None = None) -> AbstractAsyncContextManager[Sandbox]:
    """A sandbox, a remote one in a directory of the folder."""
    directory = f"{folder}/work" if options.backend == "remote" else None
    return started(open_sandbox(options, image=None, directory=directory))


async def test_files_and_exit_codes(options: SandboxOptions, tmp_path: Path) -> None:
    async with opened(options, tmp_path) as sandbox:
        await sandbox.write({"a.txt": "alpha\n", "deep/er/b.txt": "beta\n"})
        with pytest.raises(ValueError, match="outside"):
            await sandbox.write({"../../../etc/outside.txt": "x"})
        read = await sandbox.run("cat a.txt deep/er/b.txt; echo oops >&2; exit 3")
        assert (read.output, read.exit_code, read.timed_out) == ("alpha\nbeta\noops\n", 3, False)
        assert (await sandbox.run("ls | sort")).output == "a.txt\ndeep\n"


@pytest.mark.parametrize(
    ("command", "output", "expected"),
    [
        ("head -c 10000000 /dev/zero | tr '\\0' x; exit 4", "x{5000}", {"truncated": True, "exit_code": 4}),
        ("yes", "(y\n){2500}", {"truncated": True}),
        ("printf 'a\\377b'", "a.+b", {"exit_code": 0}),
        ("echo begun; sleep 4711.1 & sleep 4711.2", "begun\n", {"timed_out": True}),
        # Waiting for the process would last beyond the limit.
        ("sleep 4711.3 & echo started", "started\n", {"exit_code": 0}),
    ],
    ids=["much output", "endless output", "no UTF-8", "slow", "in the background"],
)
async def test_a_commands_output_and_processes_have_an_end(
    options: SandboxOptions, tmp_path: Path, command: str, output: str, expected: dict[str, Any]
) -> None:
    short = replace(LIMITS, timeout_seconds=1.5) if "timed_out" in expected else LIMITS
    async with opened(replace(options, limits=short), tmp_path) as sandbox:
        result = await sandbox.run(command)
    assert re.fullmatch(output, result.output) and result.output.encode()
    assert {name: getattr(result, name) for name in expected} == expected
    assert command != "yes" or result.exit_code != 0
    wait_until_gone("sleep 4711.")


@pytest.mark.parametrize("unconfined", BOTH)
async def test_commands_run_at_the_same_time_and_do_not_end_each_other(unconfined: bool) -> None:
    meet = "sleep 9 & touch met{0}; until [ -e met0 -a -e met1 -a -e met2 ]; do sleep 0.05; done; sleep 0.{0}; echo met"
    async with opened(SandboxOptions(limits=LIMITS, unconfined=unconfined)) as sandbox:
        results = await asyncio.gather(*[sandbox.run(meet.format(number)) for number in range(3)])
    assert [(result.output, result.timed_out) for result in results] == [("met\n", False)] * 3


async def test_a_sandbox_that_is_gone_is_told_apart_from_a_failing_command(
    server: dict[str, Any], tmp_path: Path
) -> None:
    async with opened(replace(HERE, limits=LIMITS)) as sandbox:
        sandbox._folder.close()  # type: ignore[attr-defined]
        with pytest.raises(SandboxDied, match="the sandbox is gone"):
            await sandbox.run("true")
        with pytest.raises(SandboxDied):
            await sandbox.write({"a": "b"})
    async with opened(SandboxOptions(backend="remote", limits=LIMITS, arguments=server), tmp_path) as sandbox:
        sandbox.deployment.runtime._config.port = 1  # type: ignore[attr-defined]
        with pytest.raises(SandboxDied, match=r"sandbox\.backend=remote stopped answering"):
            await sandbox.run("true")


async def test_a_back_end_that_cannot_start_names_its_key() -> None:
    refused = {"host": "http://127.0.0.1", "port": 1, "auth_token": "x", "startup_timeout": 5}
    with pytest.raises(SandboxError, match=r"sandbox\.backend=remote did not start"):
        async with opened(SandboxOptions(backend="remote", arguments=refused)):
            pytest.fail("it started")
    with pytest.raises(SandboxError, match=r"sandbox\.backend=docker"):
        options = SandboxOptions(backend="docker", arguments={"container_runtime": "no-such-program"})
        open_sandbox(options, image="python:3.11", directory="/testbed")
    with pytest.raises(SandboxError, match=r"sandbox\.backend=local runs no container.*sandbox\.backend=docker"):
        open_sandbox(HERE, image="python:3.11", directory="/testbed")


def test_without_bubblewrap_a_session_is_refused_unless_it_is_called_unconfined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match=r"sandbox\.backend='confined': expected local or docker or modal or remote"):
        SandboxOptions(backend="confined")  # type: ignore[arg-type]
    monkeypatch.setattr("tree_rl.rollout.sandbox.sandbox.why_no_bubblewrap", lambda: "no such program")
    with pytest.raises(ValueError, match=r"bubblewrap .* \(no such program\); .*sandbox\.unconfined=true"):
        SandboxOptions()
    assert SandboxOptions(unconfined=True).backend == "local"
    assert SandboxOptions(backend="docker").backend == "docker"


@pytest.mark.parametrize(
    ("limits", "seconds"),
    [(Limits(timeout_seconds=1800), 1800), (replace(Limits(), timeout_seconds=44.5), 45), (LIMITS, 5)],
)
async def test_cpu_time_follows_the_time_limit_unless_it_is_given(limits: Limits, seconds: int) -> None:
    async with opened(SandboxOptions(limits=limits, unconfined=True)) as sandbox:
        assert (await sandbox.run("ulimit -t")).output == f"{seconds}\n"
