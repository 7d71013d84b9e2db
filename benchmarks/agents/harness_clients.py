"""How each harness calls its shell, and what a model says through it that repairs a task."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellTool:
    """A harness's tool for shell commands."""

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
