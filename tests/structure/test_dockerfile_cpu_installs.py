"""Every step of Dockerfile.cpu runs as written, in a root file system that is thrown away; its health check passes.

There is no container engine and no base image here: the steps run in a chroot over this machine's own system, which is
Debian too, with an overlay that takes every write. Needs root, and a registry for Debian and Python packages.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTER = """
set -euo pipefail
cd "$1"
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work merged
mount --rbind /proc merged/proc && mount --rbind /dev merged/dev && mount --rbind /sys merged/sys
exec chroot $2 merged env -i "${@:4}" bash -euo pipefail -c "$3"
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"),
]


class ThrowAwayRoot:
    """A root file system over this machine's; writes land in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.variables |= {"HOME": "/root", "PATH": f"{self._python_folder()}:{system}"}
        for name in ("upper", "work", "merged"):
            (folder / name).mkdir(exist_ok=True)
        # The image's user has to reach an interpreter that lies in root's home here.
        assert self.run("chmod o+x /root").returncode == 0

    def run(self, command: str, *, user: str = "", working_folder: str = "/") -> subprocess.CompletedProcess[str]:
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        entered = f"cd {working_folder} && {command}"
        options = f"--userspec={user}" if user else "--"
        return subprocess.run(
            ["unshare", "--mount", "bash", "-c", ENTER, "enter", str(self.folder), options, entered, *variables],
            capture_output=True, text=True, timeout=1200, check=False,
        )  # fmt: skip

    def path(self, inside: str) -> Path:
        return self.folder / "upper" / inside.lstrip("/")

    def _python_folder(self) -> Path:
        """A folder with nothing but the interpreter: a base image holds no packages either."""
        folder = self.path("/python")
        folder.mkdir(parents=True)
        (folder / "python3").symlink_to(Path(sys.base_prefix).resolve() / "bin/python3")
        return Path("/python")


def read_dockerfile(path: Path) -> list[tuple[str, str]]:
    """Instructions in capitals, such as RUN, and what follows, continued lines joined, comments left out."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    parts = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(word.upper(), text.strip()) for word, text in parts]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[ThrowAwayRoot]:
    yield ThrowAwayRoot(tmp_path)
    shutil.rmtree(tmp_path / "upper")


def test_steps_run_and_the_health_check_passes(root: ThrowAwayRoot) -> None:
    folder, user, steps, health = "/", "", 0, []
    for word, text in read_dockerfile(ROOT / "docker/Dockerfile.cpu"):
        if word == "WORKDIR":
            folder = text
            root.path(folder).mkdir(parents=True)
        elif word == "ENV":
            for setting in shlex.split(text):
                name, _, value = setting.partition("=")
                root.variables[name] = value.replace("$PATH", root.variables["PATH"])
        elif word == "COPY":
            *sources, target = shlex.split(text)
            copy_tracked(sources, root.path(folder) / target)
        elif word == "RUN":
            done = root.run(text, user=user, working_folder=folder)
            assert done.returncode == 0, f"RUN {text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            steps += 1
        elif word == "USER":
            user = text
        elif word == "HEALTHCHECK":
            health = json.loads(text.partition("CMD")[2])
    assert steps >= 4
    checked = root.run(f"export HOME=~tree && id -u && {shlex.join(health)}", user=user, working_folder=folder)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.splitlines()[0] == "10001"
    assert re.search(r"^plugin in a fresh process +ok", checked.stdout, re.MULTILINE)
    written = root.run("cd /tmp && tree-rl recipes mine && ls mine/recipes mine/examples", user=user)
    assert written.returncode == 0 and "swe_grpo" in written.stdout, written.stdout + written.stderr
    login = root.run("bash -lc 'command -v ray tree-rl'", user=user)
    assert login.stdout.splitlines() == ["/opt/venv/bin/ray", "/opt/venv/bin/tree-rl"]


def copy_tracked(sources: list[str], target: Path) -> None:
    """Copy what a clone holds: files and, of folders, their contents, as COPY does."""
    for source in sources:
        listed = subprocess.run(["git", "ls-files", "--", source], cwd=ROOT, capture_output=True, text=True, check=True)
        assert listed.stdout, source
        for name in listed.stdout.splitlines():
            within = Path(name).relative_to(source) if (ROOT / source).is_dir() else Path(Path(name).name)
            copy = target / within
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy)
