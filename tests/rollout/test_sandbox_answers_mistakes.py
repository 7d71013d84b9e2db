"""What an agent does wrong is answered by a result, and its session goes on."""

from collections.abc import Iterator
from contextlib import closing

import pytest
from sandboxes_here import BOTH

from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.sandbox_folder import SandboxFolder


@pytest.fixture(params=BOTH)
def sandbox(request: pytest.FixtureRequest) -> Iterator[SandboxFolder]:
    limits = Limits(timeout_seconds=30, output_bytes=400_000)
    with closing(SandboxFolder({"a.txt": "alpha\n"}, limits=limits, unconfined=request.param)) as made:
        yield made


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
