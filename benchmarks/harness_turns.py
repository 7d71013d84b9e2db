"""Turns of a model in Hermes' form, as harness_rows.py scripts them: text, and calls of the shell of each harness."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).parents[1] / "tests" / "rollout" / "reasoning_chat.jinja"
"""Chat template of models that think, which drops thoughts before the latest question."""
END = "<|im_end|>"
Call = tuple[str, Mapping[str, Any]]
"""Name and arguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellTool:
    """How a harness calls its shell."""

    name: str
    command: str = "command"
    """Argument that takes the command."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments."""

    def call(self, command: str) -> Call:
        """Name and arguments of a call."""
        return self.name, {self.command: command, **self.more}


SHELLS: Mapping[str, ShellTool] = {
    "claude_code": ShellTool(name="Bash", more={"description": "next step"}),
    "codex": ShellTool(name="exec_command", command="cmd"),
    "opencode": ShellTool(name="bash", more={"description": "next step"}),
    "qwen_code": ShellTool(name="run_shell_command", more={"is_background": False}),
}
"""Agents that call tools."""


def written(tokenizer: Any, content: str, *calls: Call) -> str:
    """A turn as the tokenizer's chat template renders it, and its end."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        functions = [{"name": name, "arguments": dict(arguments)} for name, arguments in calls]
        message["tool_calls"] = [{"type": "function", "function": one} for one in functions]
    question = [{"role": "user", "content": "x"}]
    asked = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    whole: str = tokenizer.apply_chat_template([*question, message], tokenize=False)
    # Some templates begin a thought in the prompt, and leave an empty one in the history.
    alike = zip(asked, whole, strict=False)
    shared = next((place for place, (one, other) in enumerate(alike) if one != other), len(asked))
    return whole[shared:].rsplit(END, 1)[0] + END


def harness_version(harness: str) -> str:
    """What a harness says of itself."""
    if harness == "mini_swe":
        return version("mini-swe-agent")
    names = {"claude_code": "claude", "qwen_code": "qwen"}
    command = [names.get(harness, harness), "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return next((word for word in said.split() if word[0].isdigit()), "")
