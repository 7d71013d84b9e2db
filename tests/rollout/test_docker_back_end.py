"""`backend: docker` through SWE-ReX's own deployment; the program `docker` is a stand-in that starts the server here.

No Docker runs here: image, isolation and limits of a real container stay untested.
"""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest
from docker_stand_in import put_docker_on_the_path

from tree_rl.rollout.sandbox import swe_rex_sandbox
from tree_rl.rollout.sandbox.open_sandbox import open_sandbox
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.sandbox import Sandbox, SandboxError, SandboxOptions

LIMITS = Limits(timeout_seconds=10, cpu_seconds=10, output_bytes=5000, memory_bytes=2 << 30, processes=40)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where the stand-in writes what it is asked."""
    return put_docker_on_the_path(tmp_path, monkeypatch).parent


def asked(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "asked.jsonl").read_text().splitlines()]


def opened(folder: Path) -> Sandbox:
    arguments = {"docker_args": ["--network=none", "--memory=2g"], "pull": "missing"}
    options = SandboxOptions(backend="docker", arguments={**arguments, "startup_timeout": 60}, limits=LIMITS)
    return open_sandbox(options, image="example/repository:1", directory=str(folder / "testbed"))


async def test_a_container_is_started_used_and_killed(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = opened(docker)
    try:
        await sandbox.start()
        await sandbox.write({"answer.py": "print(6 * 7)"})
        done = await sandbox.run("python3 answer.py; exit 3")
        assert (done.output, done.exit_code, done.timed_out) == ("42\n", 3, False)
        # As for a command that may take longer than one request does.
        monkeypatch.setattr(swe_rex_sandbox, "REQUEST_SECONDS", 1.0)
        monkeypatch.setattr(swe_rex_sandbox, "POLL_SECONDS", 0.4)
        started = time.monotonic()
        slow = await sandbox.run("echo first; sleep 1.5; echo 'last line'; exit 5")
        assert (slow.output, slow.exit_code, slow.timed_out) == ("first\nlast line\n", 5, False)
        assert 1.5 <= slow.seconds <= time.monotonic() - started
    finally:
        await sandbox.close()
    inspected, run, killed = asked(docker)
    assert inspected == ["inspect", "example/repository:1"]
    name = run[run.index("--name") + 1]
    assert {"--rm", "--network=none", "--memory=2g"} <= set(run[: run.index("--name")])
    assert run[run.index("--name") + 2] == "example/repository:1"
    assert killed == ["kill", name]
    with pytest.raises(ProcessLookupError):
        os.kill(int((docker / f"{name}.pid").read_text()), 0)


def test_a_container_that_ends_at_once_names_its_key(docker: Path) -> None:
    program = docker / "docker"
    program.write_text(program.read_text().replace("os.execvp", "sys.exit('no such image') #"))

    async def start() -> None:
        sandbox = opened(docker)
        try:
            await sandbox.start()
        finally:
            await sandbox.close()

    with pytest.raises(SandboxError, match=r"(?s)sandbox\.backend=docker did not start.*no such image"):
        asyncio.run(start())


def test_what_a_back_end_raises_while_it_is_built_names_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    class RefusedError(Exception):
        """As Modal's, which derives from no error of Python's own."""

    def refuse(**arguments: object) -> None:
        raise RefusedError("Token missing")

    monkeypatch.setitem(swe_rex_sandbox.CONFIGS, "modal", refuse)  # type: ignore[arg-type]
    with pytest.raises(SandboxError, match=r"sandbox\.backend=modal.*Token missing"):
        open_sandbox(SandboxOptions(backend="modal"), image="example/repository:1", directory=None)
