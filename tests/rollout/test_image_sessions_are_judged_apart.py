"""Sessions in containers are judged in another container, which gets what the agent changed and nothing else.

The program `docker` is a stand-in that starts SWE-ReX's server here; bubblewrap gives every container of an image
processes and a folder of its own. Image, isolation and limits of a real container stay untested.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from judged_tasks import BUGGY, SOUND, UNITTEST, VISIBLE
from sandboxes_here import REASON, started
from small_swe import score_after, writing

from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.environments.swe_reports import TestReport
from tree_rl.rollout.sandbox import swe_rex_sandbox
from tree_rl.rollout.sandbox.container_changes import MAX_BYTES, checked_changes
from tree_rl.rollout.sandbox.open_sandbox import open_sandbox
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.sandbox import Sandbox, SandboxDied, SandboxError, SandboxOptions

LIMITS = Limits(timeout_seconds=20, cpu_seconds=20, memory_bytes=2 << 30)
DOCKER = SandboxOptions(backend="docker", arguments={"pull": "never", "startup_timeout": 60}, limits=LIMITS)
IMAGE = "example/durations:1"
GIT = "git -c user.name=a -c user.email=a@b"
PROGRAM = """#!{python}
import json, os, shutil, sys
folder, arguments, server = "{folder}", sys.argv[1:], {server!r}
with open(folder + "/asked.jsonl", "a") as file:
    file.write(json.dumps(arguments) + "\\n")
if arguments[0] == "run":
    name = arguments[arguments.index("--name") + 1]
    with open(folder + "/" + name + ".pid", "w") as file:
        file.write(str(os.getpid()))
    port = arguments[arguments.index("-p") + 1].removesuffix(":8000")
    start = arguments[-1].partition(" || ")[0].split()
    assert arguments[-3:-1] == ["/bin/sh", "-c"] and start[0] == "swerex-remote", arguments
    command = [server, *start[1:], "--host", "127.0.0.1", "--port", port]
    if os.path.isdir(folder + "/image"):
        # Every container has processes and a copy of the image's folder of its own.
        shutil.copytree(folder + "/image", folder + "/" + name, symlinks=True)
        hide = ["--bind", folder + "/" + name, folder + "/testbed", "--unshare-pid", "--proc", "/proc"]
        devices = ["--dev-bind", "/dev", "/dev", "--die-with-parent"]
        command = ["bwrap", "--bind", "/", "/", *devices, *hide, "--", *command]
    os.execvp(command[0], command)
if arguments[0] == "kill":
    os.kill(int(open(folder + "/" + arguments[1] + ".pid").read()), 9)
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where the stand-in writes what it is asked, and NAME.pid for every container."""
    program, server = tmp_path / "docker", str(Path(sys.executable).with_name("swerex-remote"))
    program.write_text(PROGRAM.format(python=sys.executable, folder=tmp_path, server=server))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def image(docker: Path) -> Path:
    """The folder with an image, the repository under git, and one folder for every container that was started."""
    if REASON is not None:
        pytest.skip(f"bubblewrap does not work here: {REASON}")
    made = docker / "image"
    (made / "tests").mkdir(parents=True)
    (docker / "testbed").mkdir()
    for name, text in {"durations.py": BUGGY, "old.py": "", "tests/test_durations.py": VISIBLE}.items():
        (made / name).write_text(text)
    subprocess.run(f"git init -q && git add . && {GIT} commit -qm Start", shell=True, check=True, cwd=made)
    return docker


def score_in_image(folder: Path, command: str, wait_seconds: float = 0) -> tuple[float, TestReport]:
    hidden = {"tests/test_durations_issue.py": UNITTEST.test_files["tests/test_durations_issue.py"]}
    task = replace(UNITTEST, files={}, image=IMAGE, directory=str(folder / "testbed"), test_files=hidden)
    task = replace(task, before_tests="git checkout -q HEAD -- tests")
    return score_after(task, command, options=DOCKER, wait_seconds=wait_seconds)


def test_what_the_agent_changed_reaches_the_judge_and_its_processes_do_not(image: Path) -> None:
    other = {"durations.py": "from hours import *\n", "hours.py": SOUND, "sub/deep/binary.txt": "x"}
    command = (
        f"mkdir -p sub/deep; {writing(other)}\nprintf '\\377\\000' > sub/deep/bytes; rm old.py\n"
        f"ln -s deep sub/inside; ln -s /etc/passwd outside; mkfifo pipe; echo x > conftest.py\n"
        f"git add -A; {GIT} commit -qm Repaired; git checkout -q -b other; git tag HEAD2\n"
        "(env -i setsid sh -c 'while :; do date > ticking; sleep 0.05; done' >/dev/null 2>&1 &)\n"
        "sleep 0.3"
    )
    reward, report = score_in_image(image, command)
    assert reward == 1.0, report
    folders = (path.with_suffix("") for path in image.glob("*.pid"))
    first, second = sorted(folders, key=lambda path: (path / "conftest.py").exists(), reverse=True)
    assert (second / "sub/deep/bytes").read_bytes() == b"\xff\0"
    assert os.readlink(second / "sub/inside") == "deep"
    assert not [name for name in ("old.py", "outside", "pipe") if os.path.lexists(second / name)]
    ticked = (first / "ticking").read_text()
    time.sleep(0.5)
    assert (first / "ticking").read_text() == ticked
    for container in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(int(container.with_suffix(".pid").read_text()), 0)


@pytest.mark.parametrize(
    "command",
    [
        "true",
        "rm -rf .git; echo 'raise SystemExit(0)' > durations.py",
        "printf '#!/bin/sh\\nexit 0\\n' > /tmp/git-$$; echo 'import os; os._exit(0)' > durations.py",
        "head -c 15000000 /dev/urandom > a; for i in 1 2 3 4 5 6; do cp a a$i; done; "
        + writing({"durations.py": SOUND}),
    ],
)
def test_no_repair_no_reward_and_no_lost_session(image: Path, command: str) -> None:
    reward, report = score_in_image(image, f"({command}) >/dev/null 2>&1; true")
    assert reward == 0.0, report


def test_an_agent_that_kills_its_server_gets_no_reward_and_keeps_its_session(image: Path) -> None:
    # Itself last: its number may come before the server's.
    kill = "sleep 0.5; for place in /proc/[0-9]*; do [ ${place#/proc/} = $$ ] || kill -9 ${place#/proc/}; done"
    reward, report = score_in_image(image, f"(setsid sh -c '{kill}' >/dev/null 2>&1 &); sleep 0.2", wait_seconds=1)
    assert (reward, "does not answer" in report.output) == (0.0, True), report


def opened(folder: Path, **arguments: Any) -> Sandbox:
    options = replace(DOCKER, arguments={**DOCKER.arguments, **arguments})
    return open_sandbox(options, image=IMAGE, directory=str(folder / "testbed"))


async def test_a_stopped_container_takes_no_command(image: Path) -> None:
    await opened(image).stop()
    async with started(opened(image)) as sandbox:
        await sandbox.stop()
        await sandbox.stop()
        with pytest.raises(SandboxDied, match="stopped"):
            await sandbox.run("true")
        with pytest.raises(SandboxDied, match="stopped"):
            await sandbox.write({"a": "b"})


async def test_a_remote_server_needs_a_second_one_for_the_judge() -> None:
    options = SandboxOptions(backend="remote", arguments={"host": "http://127.0.0.1", "port": 1, "auth_token": "x"})
    row = {"swe": replace(UNITTEST, image=IMAGE).to_row()}
    with pytest.raises(SandboxError, match=r"sandbox\.arguments\.judge"):
        await SweEnvironment(options).reset(row)


def test_unconfined_sessions_are_judged_in_another_folder() -> None:
    options = SandboxOptions(unconfined=True, limits=LIMITS)
    left = f"{writing({'durations.py': SOUND})}\n(setsid sleep 61.74 &) ; echo"
    assert score_after(UNITTEST, left, options=options)[0] == 1.0
    assert not subprocess.run(["pgrep", "-f", "sleep 61[.]74"], check=False, capture_output=True).stdout
    assert score_after(UNITTEST, "true", options=options)[0] == 0.0


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


def kind(name: str, tar_type: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = tar_type, target, 0o7777
    return member, b""


def test_of_a_tar_only_files_and_links_inside_are_kept() -> None:
    given = packed(
        (tarfile.TarInfo("./a/file"), b"x"),
        (tarfile.TarInfo("a/left"), b"x"),
        kind("device", tarfile.BLKTYPE),
        kind("pipe", tarfile.FIFOTYPE),
        kind("hard", tarfile.LNKTYPE, "/etc/passwd"),
        kind("out", tarfile.SYMTYPE, "../x"),
        kind("a/in", tarfile.SYMTYPE, "../b"),
        kind("setuid", tarfile.REGTYPE),
    )
    kept, gone = checked_changes(given, b"gone\0a/left\0", leave_out=lambda path: path == "a/left")
    with tarfile.open(fileobj=io.BytesIO(kept)) as archive:
        members = {member.name: member for member in archive}
    assert (sorted(members), gone) == (["a/file", "a/in", "setuid"], ["gone"])
    assert members["setuid"].mode == 0o755


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", packed()[:20], packed((tarfile.TarInfo("../x"), b"")), packed((tarfile.TarInfo("/x"), b""))],
    ids=["nothing", "no gzip", "cut", "above", "absolute"],  # a packed file holds the time
)
def test_what_is_no_tar_of_files_inside_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="agent's changes"):
        checked_changes(content, b"", leave_out=lambda path: False)


def test_a_bomb_is_refused() -> None:
    with pytest.raises(ValueError, match="exceed"):
        checked_changes(packed((tarfile.TarInfo("zeros"), bytes(MAX_BYTES))), b"", leave_out=lambda path: False)
    with pytest.raises(ValueError, match="inside"):
        checked_changes(packed(), b"../x\0", leave_out=lambda path: False)


async def test_a_container_is_started_used_and_killed(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(opened(docker, docker_args=["--network=none", "--memory=2g"], pull="missing")) as sandbox:
        await sandbox.write({"answer.py": "print(6 * 7)"})
        done = await sandbox.run("python3 answer.py; exit 3")
        assert (done.output, done.exit_code, done.timed_out) == ("42\n", 3, False)
        # As for a command that may take longer than one request does.
        monkeypatch.setattr(swe_rex_sandbox, "REQUEST_SECONDS", 1.0)
        monkeypatch.setattr(swe_rex_sandbox, "POLL_SECONDS", 0.4)
        begun = time.monotonic()
        slow = await sandbox.run("echo first; sleep 1.5; echo 'last line'; exit 5")
        assert (slow.output, slow.exit_code, slow.timed_out) == ("first\nlast line\n", 5, False)
        assert time.monotonic() - begun >= 1.5
    inspected, run, killed = [json.loads(line) for line in (docker / "asked.jsonl").read_text().splitlines()]
    assert inspected == ["inspect", IMAGE]
    name = run[run.index("--name") + 1]
    assert {"--rm", "--network=none", "--memory=2g"} <= set(run[: run.index("--name")])
    assert run[run.index("--name") + 2] == IMAGE
    assert killed == ["kill", name]
    with pytest.raises(ProcessLookupError):
        os.kill(int((docker / f"{name}.pid").read_text()), 0)


async def test_a_container_that_ends_at_once_names_its_key(docker: Path) -> None:
    program = docker / "docker"
    program.write_text(program.read_text().replace("os.execvp", "sys.exit('no such image') #"))
    with pytest.raises(SandboxError, match=r"(?s)sandbox\.backend=docker did not start.*no such image"):
        async with started(opened(docker)):
            pytest.fail("it started")


def test_what_a_back_end_raises_while_it_is_built_names_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    class RefusedError(Exception):
        """As Modal's, which derives from no error of Python's own."""

    def refuse(**arguments: object) -> None:
        raise RefusedError("Token missing")

    monkeypatch.setitem(swe_rex_sandbox.CONFIGS, "modal", refuse)  # type: ignore[arg-type]
    with pytest.raises(SandboxError, match=r"sandbox\.backend=modal.*Token missing"):
        open_sandbox(SandboxOptions(backend="modal"), image=IMAGE, directory=None)
