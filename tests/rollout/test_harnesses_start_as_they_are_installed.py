"""Harnesses by name: found where they are installed, started in the sandbox, and heard when they fail."""

import csv
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from gateway_harness import build_tokenizer, talking, user
from sandboxes_here import HERE, needs_bubblewrap
from small_swe import ScriptedModel, all_tasks, work_on

from tree_rl.rollout.agents.agents_by_name import AGENTS, ENVIRONMENTS, build, check
from tree_rl.rollout.agents.harnesses import HarnessAgent
from tree_rl.rollout.agents.in_environment import AgentInEnvironment, FinishedTask
from tree_rl.rollout.agents.installed_program import find_program
from tree_rl.rollout.environments.swe import SweEnvironment

MATRIX = Path(__file__).parents[2] / "benchmarks" / "agents" / "matrix.py"
HARNESSES = ("claude_code", "codex", "gemini_cli", "qwen_code", "opencode", "openhands", "aider")


def program(path: Path, text: str = "#!/bin/sh\ntrue\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


ASKS_THRICE = """
import json, os, urllib.request
for _ in range(3):
    body = json.dumps({"messages": [{"role": "user", "content": "again"}]}).encode()
    headers = {"x-api-key": os.environ["OPENAI_API_KEY"]}
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    urllib.request.urlopen(asked).read()
"""
TASK = all_tasks()["lru_cache"]


async def play(acting: AgentInEnvironment, **gateway_options: int) -> FinishedTask:
    async with talking(ScriptedModel(build_tokenizer(), lambda prompt: "DONE"), **gateway_options) as talk:
        parts = {"agent": acting._agent, "environment": acting._environment, "endpoint": talk.endpoint}
        return await work_on(TASK, **parts, seconds=30)


class Unjudged(SweEnvironment):
    """Saves the time of the tests."""

    async def score(self, outcome: Any) -> float:
        return 1.0


@needs_bubblewrap
@pytest.mark.parametrize("name", HARNESSES)
async def test_a_harness_gets_the_task_its_arguments_and_the_gateway(
    name: str, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{open_folder}:{os.environ['PATH']}")
    monkeypatch.setitem(ENVIRONMENTS, "swe", f"{__name__}.Unjudged")
    harness = resolve_name(AGENTS[name])
    assert issubclass(harness, HarnessAgent)
    program(open_folder / harness.program, '#!/bin/sh\nfor one in "$@"; do echo "<$one>"; done; env; pwd\n')
    options = {"arguments": "--its-own 'two words'", "variables": {"MARK": "for {model}"}}
    done = await play(AgentInEnvironment(agent=name, options=options))
    assert done.status == "completed", done
    said = done.outcome.answer
    assert "<--its-own>\n<two words>\n" in said and "throws away the wrong entry" in said and "policy" in said
    assert "HOME=/tmp/home\n" in said and "MARK=for policy\n" in said and said.endswith("/workspace\n")
    assert not re.search(r"\{(program|arguments|prompt|model)\}", said)
    assert "http://127.0.0.1:8700/s/" in said


async def test_a_harness_that_fails_says_so_in_the_log(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", f"{open_folder}:{os.environ['PATH']}")
    program(open_folder / "claude", "#!/bin/sh\nseq 30\nprintf 'no \\033[1mlicence\\n'\nexit 7\n")
    acting = AgentInEnvironment(agent="claude_code", sandbox={"unconfined": HERE.unconfined})
    async with talking(ScriptedModel(build_tokenizer(), lambda prompt: "DONE")) as talk:
        with caplog.at_level(logging.WARNING):
            result = await acting.run(talk.endpoint, task={"swe": TASK.to_row()}, messages=[user("Repair it.")])
    assert (result.status, result.reward) == ("agent_failed", 0.0)
    (line,) = [record.getMessage() for record in caplog.records if "agent claude_code" in record.getMessage()]
    assert line.startswith("agent claude_code: session agent_failed: its program ended with status 7; its last lines:")
    assert line.endswith("30\n    no \\x1b[1mlicence") and "\n    12\n" in line and "\n    11\n" not in line


@pytest.mark.parametrize("status", [0, 7])
async def test_a_program_that_is_refused_further_calls_is_out_of_calls(
    status: int, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it makes of the refusal."""
    monkeypatch.setitem(ENVIRONMENTS, "swe", f"{__name__}.Unjudged")
    program(open_folder / "asks.py", ASKS_THRICE)
    options = {"command": f"python3 {open_folder}/asks.py {{prompt}} || exit {status}"}
    sandbox = {"readable": [str(open_folder)], "unconfined": HERE.unconfined}
    acting = AgentInEnvironment(agent="command_line", options=options, sandbox=sandbox)
    assert (await play(acting, max_calls=3)).status == "completed"
    done = await play(acting, max_calls=2)
    assert (done.status, done.reward) == ("out_of_calls", 1.0)
    assert "HTTP Error 403" in done.outcome.answer + done.detail


def test_a_program_is_shown_with_its_libraries(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = open_folder / "lib" / "node_modules"
    script = program(modules / "maker" / "tool" / "cli.js", "#!/usr/bin/env node\n")
    node = program(open_folder / "runtime" / "node")
    (open_folder / "bin").mkdir()
    (open_folder / "bin" / "tool").symlink_to(script)
    monkeypatch.setenv("PATH", f"{open_folder}/bin:{open_folder}/runtime:/usr/bin:/bin")
    found = find_program("tool", "npm install tool")
    assert (found.path, found.readable) == (script, (str(modules), str(node.parent)))
    assert found.search_path.startswith(f"{node.parent}:")

    virtual = open_folder / "venv"
    program(virtual / "bin" / "snake", "#!python\n")
    (virtual / "pyvenv.cfg").write_text("")
    base = program(open_folder / "python" / "bin" / "python3")
    (virtual / "bin" / "python").symlink_to(base)
    assert find_program(f"{virtual}/bin/snake", "").readable == (str(virtual), str(base.parent.parent))
    assert find_program("sh", "").readable == ()


def test_a_program_that_sandboxes_cannot_use_is_refused_with_its_remedy(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{open_folder}/closed:/usr/bin:/bin")
    missing = r"agent=claude_code: no program 'claude' on the PATH of .*: npm install -g @anthropic-ai/claude-code, or"
    with pytest.raises(ValueError, match=missing):
        AgentInEnvironment(agent="claude_code")
    program(open_folder / "closed" / "claude")
    (open_folder / "closed").chmod(0o700)
    if os.geteuid() == 0:
        with pytest.raises(ValueError, match=r"closed is closed to others; install it elsewhere, such as /opt"):
            AgentInEnvironment(agent="claude_code")


def test_installation_counts_where_the_sessions_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if shutil.which("codex"):
        pytest.skip("Codex is among the system's programs")
    check({"agent": "codex"}, is_this_machine=False)
    check({"agent": "my_package.Agent", "environment": "my_package.World"}, is_this_machine=True)
    with pytest.raises(ValueError, match="no program 'codex'"):
        check({"agent": "codex"}, is_this_machine=True)


def test_a_harness_works_in_an_environment_without_options() -> None:
    agent, environment = build("aider", {"program": "/bin/true"}, "builtins.object", None)
    assert (type(agent).__name__, type(environment)) == ("Aider", object)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["anthropic", *HARNESSES])
def test_a_real_client_repairs_a_task_in_one_row(name: str, tmp_path: Path) -> None:
    argv = [sys.executable, str(MATRIX), str(tmp_path / "cells.csv"), "--clients", name]
    finished = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    if not (tmp_path / "cells.csv").exists():
        pytest.skip(f"{name} is not installed")
    cells = list(csv.DictReader((tmp_path / "cells.csv").open()))
    if name == "anthropic":
        assert [cell["stream"] for cell in cells] == ["streamed", "whole"]
    rows = "2" if name == "opencode" else "1"  # opencode asks for a title besides
    assert all((cell["works"], cell["rows"], cell["differences"]) == ("True", rows, "0") for cell in cells), cells
