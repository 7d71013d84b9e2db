"""Whether the flags, variables, files and config keys of a command are known to the program that it starts."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import typer
from shell_blocks import ALL, ROOT, Command

from tree_rl.cli import app

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OPTIONS_OF_TORCHRUN = {"--nproc-per-node": 1, "--standalone": 0}
"""And how many values each has."""


def starts_a_python_program(words: Sequence[str]) -> bool:
    """Whether the command starts a program of this repository that reads its arguments itself."""
    if words[0] not in ("python", "torchrun"):
        return False
    if words[1] == "-m":
        return words[2].startswith("tree_rl.") and words[2] not in ("tree_rl.train", "tree_rl.sft")
    return any((ROOT / word).exists() for word in words[1:] if "/" in word)


def python_program(command: Command) -> dict[str, object]:
    """Target, arguments and PYTHONPATH of a command that starts a program with argparse."""
    words = expanded(command)[1:]
    if command.words[0] == "torchrun":
        while words[0].startswith("--"):
            words = words[1 + OPTIONS_OF_TORCHRUN[words[0]] :]
    elif words[0] == "-m":
        words = words[1:]
    paths = dict(command.variables).get("PYTHONPATH", "")
    folders = [str(ROOT / part) for part in paths.split(":") if part]
    return {"target": words[0], "arguments": words[1:], "paths": folders}


def expanded(command: Command) -> list[str]:
    """The words, with the shell variables that the same page sets: a loop's by its first turn, others are 1."""
    loops = dict(re.findall(r"\bfor (\w+) in ([\w.-]+)", (ROOT / command.document).read_text(encoding="utf-8")))
    alone = [other for other in ALL if other.document == command.document and not other.words]
    values = dict(variable for other in alone for variable in other.variables)
    words: list[str] = []
    for word in command.words:
        if word.startswith("$") and word[1:] in values:
            words += shlex.split(values[word[1:]])
        else:
            words.append(re.sub(r"\$(\w+)", lambda found: loops.get(found[1], "1"), word))
    return words


def complaints_of_parsers(commands: Sequence[Command]) -> dict[Command, str | None]:
    """What the parsers of programs with argparse say, all in one process."""
    asked = json.dumps([python_program(command) for command in commands])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("read_arguments.py"))],
        input=asked, capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(commands, json.loads(done.stdout.splitlines()[-1]), strict=True))


def check_tree_rl(command: Command) -> None:
    """Raises click's error where the command or an option of it does not exist, or a value is none."""
    _, name, *arguments = expanded(command)
    if name.startswith("-"):
        check_option_names(command.words)
    else:
        typer.main.get_command(app).commands[name].make_context(name, arguments).close()


def check_option_names(words: Sequence[str]) -> None:
    """The command of `tree-rl` and its options exist, whatever their values."""
    group = typer.main.get_command(app)
    command = group if words[1].startswith("-") else group.commands[words[1].rstrip(",")]  # type: ignore[attr-defined]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in words[1:]:
        name = word.partition("=")[0]
        assert not name.startswith("--") or name in {*known, "--help"}, f"{words[:2]} has no {name}"


def check_script(command: Command) -> None:
    """The shell script exists, is sound, and reads every variable that the command sets."""
    script = ROOT / next(word for word in command.words if word.endswith((".sh", ".sbatch")))
    subprocess.run(["bash", "-n", str(script)], check=True)
    sources = script.read_text(encoding="utf-8")
    if script.parent.parent.name == "recipes":
        sources += (ROOT / "recipes" / "launcher.sh").read_text(encoding="utf-8")
        if script.parent.name == "swe_ppo":
            sources += (ROOT / "recipes" / "swe_grpo" / "run_qwen3_fsdp2.sh").read_text(encoding="utf-8")
    elif script.parent.name == "cluster":
        sources += "".join(path.read_text(encoding="utf-8") for path in script.parent.glob("*") if path.is_file())
    for name, _ in command.variables:
        assert name == "PYTHONPATH" or re.search(rf"\b{name}\b", sources), f"{script.name} reads no {name}"


def check_pytest(command: Command) -> None:
    """The files, the marker and the name that is asked for exist."""
    words = command.words[command.words.index("pytest") + 1 :]
    paths = [ROOT / word for word in words if "/" in word]
    assert paths and all(path.exists() for path in paths)
    markers = {line.partition(":")[0] for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    for option, value in itertools.pairwise(words):
        assert option != "-m" or value in markers
        assert option != "-k" or any(value in path.read_text(encoding="utf-8") for path in paths)


def check_pip(command: Command) -> None:
    """Constraints files and extras of this project exist."""
    words = command.words
    assert all((ROOT / value).is_file() for option, value in itertools.pairwise(words) if option == "-c")
    for word in words:
        for extra in (part for found in re.findall(r"^(?:\.|tree_rl)\[(.*)\]$", word) for part in found.split(",")):
            assert extra in PROJECT["project"]["optional-dependencies"], f"no extra {extra}"


def check_docker(command: Command) -> None:
    """The Dockerfile exists."""
    assert all((ROOT / value).is_file() for option, value in itertools.pairwise(command.words) if option == "-f")


def environment() -> dict[str, str]:
    """Of a reader's shell: the interpreter that runs this is `python`, and its programs are found."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"}
