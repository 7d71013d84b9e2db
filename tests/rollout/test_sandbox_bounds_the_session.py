"""Memory, processes and files of a whole session have limits, whichever of its commands and places holds them."""

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from sandboxes_here import needs_bubblewrap

from tree_rl.rollout.sandbox.processes.bubblewrap import SCRATCH, SCRATCH_BYTES
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.sandbox_folder import SandboxFolder

LIMITS = Limits(
    timeout_seconds=60, cpu_seconds=60, memory_bytes=256 << 20, file_bytes=128 << 20, disk_bytes=64 << 20, processes=40
)
HOLD = "python3 -c 'import time; held = b\"x\" * ({} << 20); time.sleep(20)'"
MEMORY = "[memory limit exceeded]"
ROOMY = Limits(timeout_seconds=60, cpu_seconds=60, memory_bytes=1 << 30, processes=40)
pytestmark = needs_bubblewrap
HELD = [HOLD.format(100)] * 4


@pytest.mark.parametrize("commands", [[f"{' & '.join(HELD)} & wait"], HELD], ids=["one command", "parallel commands"])
def test_processes_that_are_small_alone_are_too_large_together(commands: list[str]) -> None:
    # The others hold what they have for long: they end with the sandbox.
    with ThreadPoolExecutor() as pool, closing(SandboxFolder(limits=LIMITS)) as sandbox:
        holding = [pool.submit(sandbox.run, command) for command in commands]
        next(as_completed(holding, timeout=LIMITS.timeout_seconds))
        assert sandbox.run("echo goes on").output == "goes on\n"
    ends = [(result.exit_code, result.timed_out) for result in map(Future.result, holding) if MEMORY in result.output]
    assert ends and set(ends) == {(-9, False)}


PROGRAMS = {
    # Forked workers share what their parent read: eight of them with 60 MiB stay below 256 MiB.
    "shared memory counts once": (
        "import os, time\nheld = b'x' * (60 << 20)\n"
        "for _ in range(8):\n if os.fork() == 0: time.sleep(1); os._exit(0)\n"
        "for _ in range(8): os.wait()\nprint('done')",
        "done\n",
    ),
    "nameless files in memory count": (
        "import os, time\nfor i in range(40):\n  f = os.memfd_create(str(i))\n"
        "  for _ in range(10): os.write(f, bytes(1 << 20))\ntime.sleep(20)",
        MEMORY,
    ),
    "memory that outlives its processes cannot be made": (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "print([libc.shmget(0, 4096, 0o1600), libc.semget(0, 1, 0o1600), libc.msgget(0, 0o1600)])",
        "[-1, -1, -1]\n",
    ),
}


@pytest.mark.parametrize(("program", "said"), PROGRAMS.values(), ids=PROGRAMS)
def test_memory_of_programs(program: str, said: str) -> None:
    with closing(SandboxFolder({"program.py": program}, limits=LIMITS)) as sandbox:
        output = sandbox.run("python3 -S program.py").output
    assert output == said or (said in output and "exceeded" in said)


def test_every_place_in_memory_has_a_size_and_counts() -> None:
    with closing(SandboxFolder(limits=ROOMY)) as sandbox:
        for place in ("", "/dev", "/run", "/run/model", "/proc", "/usr", "/etc", *SCRATCH):
            result = sandbox.run(f"head -c {4 * SCRATCH_BYTES} /dev/zero > {place}/filled; stat -c %s {place}/filled")
            assert (place in SCRATCH) == result.output.strip().isdigit() or "exceeded" in result.output, (place, result)
        for place in SCRATCH:
            full = f"i=0; while head -c 8000000 /dev/zero > {place}/$i; do i=$((i+1)); done 2>/dev/null; du -sk {place}"
            assert int(sandbox.run(full).output.split()[0]) * 1024 <= SCRATCH_BYTES
    with closing(SandboxFolder(limits=LIMITS)) as sandbox:
        fill = "".join(f"head -c 60000000 /dev/zero > {place}/filled; " for place in SCRATCH)
        result = sandbox.run(f"{fill} {HOLD.format(160)}")
        assert MEMORY in result.output


def test_processes_of_parallel_commands_count_together() -> None:
    if os.geteuid() == 0:
        pytest.skip("a user of its own has its limit from the kernel")
    command = "for i in $(seq 30); do sleep 20 & done; wait"
    with ThreadPoolExecutor() as pool, closing(SandboxFolder(limits=LIMITS)) as sandbox:
        results = list(pool.map(sandbox.run, [command] * 3))
    assert any("[process limit exceeded]" in result.output for result in results)


@pytest.mark.parametrize(
    "fill",
    [
        "for i in range(5000): open(f'f{i}', 'w').close()",
        "for i in range(5000): os.mkdir(f'd{i}')",
        "for i in range(300): os.mkdir('d'); os.chdir('d')",
    ],
    ids=["files", "folders", "depth"],
)
def test_entries_and_depth_count_against_the_disk(fill: str) -> None:
    program, few = f"import os, time\n{fill}\ntime.sleep(20)", replace(LIMITS, disk_bytes=16 << 20)
    with closing(SandboxFolder({"fill.py": program}, limits=few)) as sandbox:
        result = sandbox.run("python3 -S fill.py")
        assert "[disk limit exceeded]" in result.output and result.exit_code == -9
        # Who deletes may go on, however long it takes.
        assert sandbox.run("find . -mindepth 1 -delete; sleep 0.5; echo freed").output == "freed\n"
        assert sandbox.run("sleep 0.5; echo and goes on").output == "and goes on\n"


def test_the_kernel_ends_commands_first_when_memory_is_short() -> None:
    change = "cat $0; (cat $0); { echo 0 > $0; } 2>/dev/null; sleep 1; cat $0".replace("$0", "/proc/self/oom_score_adj")
    with closing(SandboxFolder(limits=ROOMY)) as sandbox:
        assert sandbox.run(change).output == "1000\n" * 3


def test_no_session_opens_user_namespaces() -> None:
    """There it could mount memory without end."""
    with closing(SandboxFolder(limits=ROOMY)) as sandbox:
        result = sandbox.run("unshare --user --map-root-user --mount sleep 20; echo on")
        assert "unshare failed" in result.output and not result.timed_out, result


PRIVATE = """
import os, sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from tree_rl.rollout.sandbox.sandbox_folder import SandboxFolder, why_no_bubblewrap
with closing(SandboxFolder(unconfined=why_no_bubblewrap() is not None)) as sandbox:
    result = sandbox.run("echo works")
    assert (result.output, result.exit_code) == ("works\\n", 0), result
"""


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_what_the_probe_finds_is_what_commands_use(open_folder: Path, mode: int) -> None:
    """bubblewrap in a folder of the trainer's PATH alone: it works for commands, or the probe says that it does not."""
    tools = open_folder / "tools"
    tools.mkdir()
    for folder in ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"):
        for program in ("bwrap", "unshare", "mount", "umount", "pivot_root", "setpriv", "prlimit", "sh"):
            if Path(folder, program).exists() and not (tools / program).exists():
                (tools / program).symlink_to(Path(folder, program))
    tools.chmod(mode)
    environment = {**os.environ, "PATH": str(tools)}
    done = subprocess.run([sys.executable, "-c", PRIVATE], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
