"""A wheel, unpacked beside the packages it needs, works from an empty folder; an sdist builds the same wheel."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAIN = [sys.executable, "-c", "from tree_rl.cli import main; main()"]
SHIPPED = ("constraints", "examples", "recipes", "scripts/cluster", "scripts/ray_token.sh")


def tracked(*names: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", *names], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.splitlines() if (ROOT / name).is_file()}


def build(kind: str, source: Path, target: Path) -> Path:
    """As `python -m build` does, with this environment's setuptools."""
    target.mkdir()
    call = f"from setuptools import build_meta as b; b.build_{kind}({str(target)!r})"
    done = subprocess.run([sys.executable, "-c", call], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tracked files alone, as in a clean clone."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", checkout, tmp_path_factory.mktemp("sdist") / "built")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the sdist: what the sdist lacks, the wheel lacks."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        # Python 3.11 has the filter from 3.11.4 on.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = folder.iterdir()
    return build("wheel", source, folder / "built")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def call(installed: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """In `folder`, with the unpacked wheel before everything else."""
    environment = {"PYTHONPATH": str(installed), "PATH": str(Path(sys.executable).parent), "COLUMNS": "200"}
    return subprocess.run(
        [*MAIN, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_a_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    code = {name.removeprefix("kernels/") for name in tracked("tree_rl", "kernels/tree_kernels")}
    shipped = {f"tree_rl/shipped/{name}" for name in tracked(*SHIPPED)}
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == {name for name in code if not name.endswith(".md") or "/static/" in name} | shipped


def test_commands_run_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    written = call(installed, tmp_path, "recipes", "here")
    assert (written.returncode, written.stderr) == (0, "")
    files = {str(path.relative_to(tmp_path / "here")) for path in (tmp_path / "here").rglob("*") if path.is_file()}
    assert files == tracked(*SHIPPED)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"uid": "a", "input_ids": [1, 2, 3]}\n{"uid": "a", "input_ids": [1, 2, 4]}\n')
    inspected = call(installed, tmp_path, "inspect", "rows.jsonl")
    assert inspected.returncode == 0, inspected.stderr
    assert "0.333" in inspected.stdout
    viewed = call(installed, tmp_path, "view", "rows.jsonl", "--html", "page.html")
    assert viewed.returncode == 0, viewed.stderr
    assert "<canvas" in (tmp_path / "page.html").read_text()
    again = call(installed, tmp_path, "recipes", "here")
    assert again.returncode == 2
    assert "recipes here: expected a new or empty folder" in again.stderr


def test_messages_name_only_files_of_the_wheel() -> None:
    """A file of the repository in a text of the package is one that `tree-rl recipes` writes."""
    named = re.compile(r"(?<![\w./])((?:scripts|examples|recipes|constraints)/[\w./]*\w)")
    written = tracked(*SHIPPED)
    folders = {str(parent) for name in written for parent in Path(name).parents}
    unknown = {
        f"{path}: {found}"
        for path in sorted(tracked("tree_rl"))
        if path.endswith(".py")
        for found in named.findall((ROOT / path).read_text(encoding="utf-8"))
        if found not in written | folders and "grpo_trainer" not in found  # verl's own example
    }
    assert not unknown


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_clean_environment_trains(wheel: Path, tmp_path: Path) -> None:
    """Two gigabytes and some minutes: the wheel alone in a new environment, outside the checkout."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv/bin/python"
    constraints = str(ROOT / "constraints/cpu.txt")
    subprocess.run(
        # -I: a repository on PYTHONPATH would pass for the installed package.
        [str(python), "-I", "-m", "pip", "install", "-q", "-c", constraints, f"{wheel}[cpu,agents]"],
        check=True,
        cwd=tmp_path,
    )
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "VERL_PLATFORM": "cpu"}
    (tmp_path / "rows.jsonl").write_text('{"uid": "a", "input_ids": [1, 2]}\n{"uid": "a", "input_ids": [1, 3]}\n')
    for command in (
        "tree-rl recipes here",
        "tree-rl doctor --no-ray",
        "cd here && STEPS=1 bash recipes/grpo/run_qwen3_fsdp2.sh",
        "tree-rl inspect rows.jsonl",
        "tree-rl view rows.jsonl --html page.html && test -s page.html",
    ):
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
