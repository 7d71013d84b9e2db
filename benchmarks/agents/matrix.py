"""Client x dialect x {whole, streamed}: each client unmodified against the gateway, a scripted model behind it.

Usage: python benchmarks/agents/matrix.py OUTPUT.csv [--python PYTHON] [--clients NAME ...] [--readable FOLDER ...]
    [--dialect NAME=TEMPLATE,END[,CALL_END,ANSWER_END] ...] [--without-hermes]

TEMPLATE is a file with a family's chat template, END its end token; Hermes is built in. A table that exists keeps its
rows, except those that are played again. Harnesses are looked up on the
PATH, libraries in PYTHON's environment; a client that is missing is left out by name. A harness repairs a small task in
its sandbox, and the tests must pass. A library calls one tool. `differences` counts calls, tokens and log-probs that
the gateway recorded or would train otherwise than the model generated them.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "swe_tasks"))
sys.path.insert(0, str(Path(__file__).parent))

from experts import write_command
from generate import build_tasks, to_row
from scripted_model import HERMES, Dialect, ScriptedModel, differences
from sdk_client import ANSWER_TOOLS, CLIENTS

from tree_rl.benchmark.results import read_csv, write_csv
from tree_rl.rollout.agents.agents_by_name import build
from tree_rl.rollout.agents.in_environment import run_task
from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.transcript import rows_of_calls
from tree_rl.tree import Forest

SECONDS = 240
TASK = "lru_cache"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellTool:
    """How a harness calls its shell."""

    name: str
    command: str = "command"
    """Argument that takes the command."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments."""

    def call(self, command: str) -> tuple[str, dict[str, Any]]:
        """Name and arguments of a call."""
        return self.name, {self.command: command, **self.more}


SHELLS: Mapping[str, ShellTool] = {
    "claude_code": ShellTool(name="Bash", more={"description": "next step"}),
    "codex": ShellTool(name="exec_command", command="cmd"),
    "gemini_cli": ShellTool(name="run_shell_command", more={"description": "next step"}),
    "opencode": ShellTool(name="bash", more={"description": "next step"}),
    "openhands": ShellTool(name="terminal", more={"security_risk": "LOW", "summary": "next step"}),
    "qwen_code": ShellTool(name="run_shell_command", more={"is_background": False}),
}
"""Agents that call tools."""


def _mini_turns(commands: list[str], files: Mapping[str, str]) -> list[str]:
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    return [f"THOUGHT: next step.\n\n```mswea_bash_command\n{command}\n```" for command in [*commands, submit]]


def _aider_turns(commands: list[str], files: Mapping[str, str]) -> list[str]:
    return ["\n".join(f"{name}\n```\n{text}\n```" for name, text in files.items())]


TEXTS: Mapping[str, tuple[str, Callable[[list[str], Mapping[str, str]], list[str]]]] = {
    "mini_swe": ("mswea_bash_command", _mini_turns),
    "aider": ("", _aider_turns),
}
"""Agents whose model answers in text -> what its prompts hold, its turns."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {"aider": {"arguments": "*.py"}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """What a client did."""

    is_right: bool
    version: str
    note: str


async def play_harness(name: str, endpoint: Any, readable: list[str]) -> Played:
    """A harness repairs the task in its sandbox."""
    task = next(task for task in build_tasks() if task.instance_id == TASK)
    sandbox = {"readable": readable} if readable else {}
    agent, environment = build(name, OPTIONS.get(name), "swe", sandbox)
    done = await run_task(
        agent=agent,
        environment=environment,
        endpoint=endpoint,
        task={"swe": task.to_row()},
        messages=to_row(task, 0, "train")["prompt"],
        timeout_seconds=SECONDS,
    )
    note = " ".join(done.detail.split())[-200:]
    return Played(is_right=(done.status, done.reward) == ("completed", 1.0), version="", note=note)


async def play_library(name: str, endpoint: Any, python: str, stream: str) -> Played:
    """A library's agent calls its tool and answers."""
    program = str(Path(__file__).with_name("sdk_client.py"))
    process = await asyncio.create_subprocess_exec(
        *(python, program, name, stream),
        env={**endpoint.environment(), "PATH": "/usr/bin:/bin", "HOME": "/tmp"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(), SECONDS)
    except TimeoutError:
        return Played(is_right=False, version="", note=f"longer than {SECONDS} s")
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        return Played(is_right=False, version="", note=errors.decode()[-200:].replace("\n", " "))
    said = json.loads(out.splitlines()[-1])
    return Played(is_right=said["answer"].strip() == "Two names.", version=said["version"], note="")


def script_of(client: str, dialect: Dialect) -> tuple[str, list[str]]:
    """What the prompts of a client hold, and the model's turns."""
    if client in ANSWER_TOOLS:
        name, calls_first = ANSWER_TOOLS[client]
        first = [dialect.writes("", ("shell", {"command": "ls"}))] if calls_first else []
        return name, [*first, dialect.writes("", (name, {"answer": "Two names."}))]
    if client in CLIENTS:
        call = dialect.writes("", ("shell", {"command": "ls"}))
        return "shell", [call, dialect.writes("Two names.")]
    task = next(task for task in build_tasks() if task.instance_id == TASK)
    files = dict(task.solution_files)
    commands = ["ls; head -20 *.py", write_command(files)]
    if client in TEXTS:
        tool, turns = TEXTS[client]
        return tool, [dialect.writes(one) for one in turns(commands, files)]
    shell = SHELLS[client]
    calls = [dialect.writes("", shell.call(one)) for one in commands]
    return shell.name, [*calls, dialect.writes("The cache is repaired.")]


async def play_cell(client: str, dialect: Dialect, stream: str, python: str, readable: list[str]) -> dict[str, str]:
    """One session, as a row of the table."""
    tool, turns = script_of(client, dialect)
    model = ScriptedModel(dialect=dialect, tool=tool, turns=turns)
    options = GatewayOptions(max_context_tokens=500_000, max_turn_tokens=20_000)
    async with Gateway(tokenizer=dialect.tokenizer, backend=model, options=options) as gateway:
        session = gateway.open_session()
        endpoint = gateway.endpoint(session)
        try:
            if client in CLIENTS:
                played = await play_library(client, endpoint, python, stream)
            else:
                played = await play_harness(client, endpoint, readable)
        except (ValueError, ImportError) as error:
            played = Played(is_right=False, version="", note=str(error)[-200:])
        record = await gateway.close_session(session)
    wrong, rows = differences(model, record), rows_of_calls(record.calls)
    cell = {
        "client": client,
        "version": played.version or harness_version(client),
        "dialect": dialect.name,
        "stream": stream,
        # Reward 1.0 for a harness, the right answer for a library, and no difference.
        "works": played.is_right and not wrong,
        "calls": len(record.calls),
        "rows": len(rows),
        "por": round(Forest.from_rows([row.token_ids for row in rows]).por, 3),
        "longest_prompt": max((len(call.prompt_ids) for call in record.calls), default=0),
        "longest_prompt_characters": max(model.prompts, default=0),
        "differences": wrong,
        "note": played.note,
    }
    return {name: str(value) for name, value in cell.items()}


def harness_version(client: str) -> str:
    """What a harness says of itself; a library that failed says nothing."""
    if client in CLIENTS:
        return ""
    if client == "mini_swe":
        import minisweagent

        return str(minisweagent.__version__)
    names = {"claude_code": "claude", "gemini_cli": "gemini", "qwen_code": "qwen"}
    said = subprocess.run([names.get(client, client), "--version"], capture_output=True, text=True, check=False).stdout
    return next((word for word in said.split() if word[0].isdigit()), "")


def installed(python: str, asked: list[str]) -> Iterator[str]:
    """The clients that are here; says which are not."""
    for name in asked:
        if name == "mini_swe":
            yield name
        elif name in CLIENTS:
            look = f"from importlib.metadata import version; version('{CLIENTS[name][0]}')"
            if subprocess.run([python, "-c", look], capture_output=True, check=False).returncode == 0:
                yield name
            else:
                print(f"{name}: not installed in {python}")
        else:
            try:
                build(name, OPTIONS.get(name), "swe", {})
            except ValueError as error:
                print(f"{name}: {error}")
            else:
                yield name


def dialects(asked: list[str], *, with_hermes: bool) -> list[Dialect]:
    """Hermes and those that the command line names."""
    made = [Dialect.of("hermes", HERMES.read_text(), "<|im_end|>")] if with_hermes else []
    for one in asked:
        name, _, rest = one.partition("=")
        file, *ends = rest.split(",")
        made.append(Dialect.of(name, Path(file).read_text(), *ends))
    return made


def main() -> None:
    """Play all cells, one after the other, and write a row of the table after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--python", default=sys.executable, help="has the libraries")
    parser.add_argument("--dialect", action="append", default=[], help="NAME=TEMPLATE,END[,CALL_END,ANSWER_END]")
    parser.add_argument("--clients", nargs="+", default=[*SHELLS, *TEXTS, *CLIENTS])
    parser.add_argument("--readable", nargs="*", default=[], help="folders that sandboxes show besides")
    parser.add_argument("--without-hermes", action="store_true", help="only the dialects that are named")
    arguments = parser.parse_args()
    clients = list(installed(arguments.python, arguments.clients))
    for dialect in dialects(arguments.dialect, with_hermes=not arguments.without_hermes):
        for client in clients:
            for stream in ("whole", "streamed") if client in CLIENTS else ("its own",):
                cell = asyncio.run(play_cell(client, dialect, stream, arguments.python, arguments.readable))
                write_cell(arguments.output, cell)
                print("ok " if cell["works"] == "True" else "NO ", *cell.values(), flush=True)


def write_cell(path: Path, cell: dict[str, str]) -> None:
    """Put a row into the table, in place of the one of the same client, dialect and stream."""
    place = ("dialect", "client", "stream")
    rows = [row for row in read_csv(path) if any(row[name] != cell[name] for name in place)]
    write_csv(path, sorted([*rows, cell], key=lambda row: [row[name] for name in place]))


if __name__ == "__main__":
    main()
