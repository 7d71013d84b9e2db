"""Commands really run, and what they must not do they cannot do. A mistake is answered, and the session goes on."""

import os
import shutil
from collections.abc import Iterator
from contextlib import closing

import pytest
from live_processes import wait_until_gone
from sandboxes_here import BOTH, needs_bubblewrap

from tree_rl.rollout.sandbox.processes.bubblewrap import SEARCH_PATH
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.processes.users import users_known
from tree_rl.rollout.sandbox.sandbox_folder import SandboxFolder


@pytest.fixture(params=BOTH)
def sandbox(request: pytest.FixtureRequest) -> Iterator[SandboxFolder]:
    limits = Limits(timeout_seconds=30, cpu_seconds=1, output_bytes=400_000, file_bytes=1 << 20, processes=12)
    with closing(
        SandboxFolder({"a.txt": "alpha\n", "sub/b.txt": "beta\n"}, limits=limits, unconfined=request.param)
    ) as made:
        yield made


def test_the_environment_is_empty(sandbox: SandboxFolder) -> None:
    os.environ["SECRET_OF_THE_TRAINER"] = "x"
    names = {line.split("=")[0] for line in sandbox.run("env").output.splitlines()}
    assert names <= {"PATH", "HOME", "PWD", "SHLVL", "_", "OLDPWD"}


def test_a_fork_bomb_is_contained(sandbox: SandboxFolder) -> None:
    if os.geteuid() != 0 and sandbox.unconfined:
        pytest.skip("without root and a namespace there is no process limit of the sandbox's own")
    result = sandbox.run("bomb() { bomb 161803 | bomb 161803 & }; bomb; sleep 1; echo still here")
    wait_until_gone("161803")
    assert sandbox.run("echo alive").output == "alive\n", result


@pytest.mark.parametrize("target", ["../escape.txt", "/escape.txt", "/etc/escape.txt", "/root/escape.txt"])
def test_writing_outside_fails(sandbox: SandboxFolder, target: str) -> None:
    if os.geteuid() != 0 and sandbox.unconfined and target == "../escape.txt":
        pytest.skip("without root and bubblewrap, the user's own rights apply")
    if os.geteuid() != 0 and target.startswith("/root"):
        pytest.skip("only root can tell what is in /root")
    path = (sandbox.directory / target).resolve()
    result = sandbox.run(f"echo x > {target}")
    assert result.exit_code != 0 or not sandbox.unconfined
    assert not path.exists()


def test_sandboxes_cannot_read_each_other(sandbox: SandboxFolder) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs a user per sandbox, hence root")
    with closing(SandboxFolder({"secret.txt": "s3cret"}, unconfined=sandbox.unconfined)) as other:
        assert "s3cret" not in sandbox.run(f"cat {other.directory}/secret.txt").output


def test_users_of_commands_are_as_many_as_the_namespace_knows() -> None:
    everybody, container = users_known("0 0 4294967295\n"), users_known("0 100000 65536\n")
    # Pairs that share a user among 512 sessions at once: three of 40,000 users, one in 16,000 runs of these.
    assert 512**2 / 2 / len(everybody) < 1e-4
    assert container[0] >= 20_000 and container[-1] < 65_536


def test_a_large_file_cannot_be_written(sandbox: SandboxFolder) -> None:
    sandbox.run("head -c 8000000 /dev/zero > big.bin")
    assert (sandbox.directory / "big.bin").stat().st_size <= 1 << 20


@pytest.mark.parametrize("name", ["../outside.txt", "/etc/passwd", "sub/../../outside.txt", "answer.txt"])
def test_nothing_outside_is_read(sandbox: SandboxFolder, name: str) -> None:
    sandbox.run("ln -s /etc/passwd answer.txt; mkfifo pipe")
    with pytest.raises(ValueError, match="leads outside"):
        sandbox.read(name)
    assert sandbox.read("pipe") is None


@needs_bubblewrap
def test_user_and_place_are_the_same_in_every_session_and_no_account_of_the_machine_shows() -> None:
    with closing(SandboxFolder(limits=Limits(memory_bytes=64 << 30))) as sandbox:
        assert sandbox.run("pwd; echo ~; echo x > /tmp/scratch; ls /tmp").output == "/workspace\n/workspace\nscratch\n"
        seen = sandbox.run("whoami; id -gn; cut -d: -f1 /etc/passwd; cut -d: -f1 /etc/group").output
        assert seen.split() == ["agent", "agent", *2 * ["agent", "root", "nobody"]]
        assert sandbox.run("echo me::0:0::/:/bin/sh >> /etc/passwd").exit_code != 0
        if shutil.which("git", path=SEARCH_PATH):
            commit = "git -c user.email=a@b -c user.name=a commit -q --allow-empty -m empty"
            assert sandbox.run(f"git init -q . && {commit} && git log --format=%s").output == "empty\n"
        if shutil.which("node", path=SEARCH_PATH):
            assert sandbox.run("node -p 'os.userInfo().username'").output == "agent\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [("echo a\0b", "NUL"), ("echo \ud800", "UTF-8"), ("echo \udc80", "UTF-8")],
    ids=["NUL", "surrogate", "escaped byte"],
)
def test_a_command_that_no_shell_can_read_is_refused(sandbox: SandboxFolder, command: str, said: str) -> None:
    result = sandbox.run(command)
    assert said in result.output and result.exit_code == 126
    result.output.encode("utf-8")
    assert sandbox.run("cat a.txt").output == "alpha\n"


@pytest.mark.parametrize("size", [119_990, 131_072, 140_000, 300_000])
def test_a_long_command_runs_as_written(sandbox: SandboxFolder, size: int) -> None:
    text = "é" * (size // 2)
    result = sandbox.run(f"cat a.txt; printf %s {text}; exit 3")
    assert (result.output, result.exit_code) == (f"alpha\n{text}", 3)
    # It cannot be altered while it runs, and standard input stays empty.
    change = "for fd in /proc/self/fd/* /proc/$$/fd/*; do echo 'echo altered' 2>/dev/null >> $fd; done; cat; echo end"
    assert sandbox.run(f"{change} # {text}\necho last").output.endswith("end\nlast\n")


@pytest.mark.parametrize("change", ["chmod 0 .", "chmod 444 .", "chmod -R a-rwx .", "chmod 7777 ."])
def test_a_locked_directory_is_opened_again(sandbox: SandboxFolder, change: str) -> None:
    sandbox.run(change)
    assert sandbox.run("touch b; ls b").output == "b\n"
    sandbox.write("c.txt", "gamma")
    assert sandbox.read("c.txt") == "gamma"


def test_a_directory_that_is_empty_or_full_of_links_still_works(sandbox: SandboxFolder) -> None:
    assert sandbox.run("rm -rf ./* ; rmdir ../workspace; ln -s . a; ln -s a b; echo on").output.endswith("on\n")
    assert sandbox.run("echo x > new; cat new").output == "x\n"
