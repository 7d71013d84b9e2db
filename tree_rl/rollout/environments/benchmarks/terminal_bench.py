"""Tasks of Terminal-Bench as software tasks: folders of Harbor (`task.toml`) and of terminal-bench (`task.yaml`).

The task's verifier runs in a new container on a copy of the agent's working directory, and writes the reward.
"""

import re
import tomllib
from collections.abc import Mapping
from typing import Any

import yaml

from tree_rl.rollout.environments.swe_task import SweTask

PLACE = ".terminal-bench-tests"
"""Folder in the working directory to which we write the tests before moving them to /tests."""
LOGS = "/logs/verifier"
REWARD = "reward"


def from_terminal_bench(row: Mapping[str, Any]) -> SweTask:
    """Convert a task's folder: its `name`, `files` (path in the folder -> text), and `image` if they name none.

    Raises `ValueError` if a file or the image is missing.
    """
    name, files = str(row.get("name", "?")), row.get("files") or {}
    if "task.toml" in files:
        instruction = _text(name, files, "instruction.md")
        settings = tomllib.loads(files["task.toml"]).get("environment", {})
        image, script, dockerfile = settings.get("docker_image"), "tests/test.sh", "environment/Dockerfile"
        tests = {path: text for path, text in files.items() if path.startswith("tests/")}
    elif "task.yaml" in files:
        settings = yaml.safe_load(files["task.yaml"])
        said = settings.get("instruction") if isinstance(settings, dict) else None
        if not isinstance(said, str):
            raise ValueError(f"{name}: task.yaml: expected the field 'instruction' with a text, received {said!r}")
        instruction, image, script, dockerfile = said, None, "run-tests.sh", "Dockerfile"
        tests = {path: text for path, text in files.items() if path.startswith("tests/") or path == script}
    else:
        raise ValueError(f"{name}: expected task.toml (Harbor) or task.yaml (terminal-bench), received {sorted(files)}")
    _text(name, files, script)
    image = row.get("image") or image
    if not image:
        raise ValueError(f"{name}: the folder names no image; build {dockerfile} and give its name (`--image`)")
    return SweTask(
        instance_id=name,
        problem_statement=instruction.strip(),
        image=image,
        directory=_directory(files.get(dockerfile, "")),
        test_files={f"{PLACE}/{path.removeprefix('tests/')}": text for path, text in tests.items()},
        test_command=_command(script.removeprefix("tests/")),
        reward_files=(f"{LOGS}/reward.txt", f"{LOGS}/reward.json"),
        fail_to_pass=(REWARD,),
        log_format="reward_file",
    )


def _command(script: str) -> str:
    """Move the tests to /tests and run them. terminal-bench writes no reward, so its script's exit status decides."""
    place = f"rm -rf /tests {LOGS} && mkdir -p {LOGS} && mv {PLACE} /tests"
    if script == "test.sh":
        return f"{place} && bash /tests/{script}"
    return f"{place} && TEST_DIR=/tests bash /tests/{script} && echo 1 > {LOGS}/reward.txt"


def _directory(dockerfile: str) -> str:
    found = re.findall(r"^\s*WORKDIR\s+(\S+)", dockerfile, re.MULTILINE | re.IGNORECASE)
    return found[-1].strip("\"'") if found else "/app"


def _text(name: str, files: Mapping[str, str], path: str) -> str:
    if not files.get(path):
        raise ValueError(f"{name}: expected the file {path!r}, received {' '.join(map(repr, sorted(files)))}")
    return files[path]
