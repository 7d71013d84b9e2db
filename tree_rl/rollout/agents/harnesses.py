"""Starts well-known command-line agents, unmodified, so that each calls only the gateway.

docs/agents has a page for each.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from tree_rl.rollout.agents.command_line import CommandLineAgent, CommandLineOptions, program_limits
from tree_rl.rollout.agents.installed_program import InstalledProgram, find_program
from tree_rl.rollout.sandbox.processes.limits import Limits

HOME = "/tmp/home"
"""HOME of a harness: in memory and new in every session, so that its settings do not change the repository."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessOptions:
    """Options of a harness."""

    arguments: str = ""
    """Further arguments of the command line, as for a shell: `--max-turns 30`."""
    program: str = ""
    """Name or path of the program; empty means its usual name."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables, which override the harness's."""
    limits: Limits = field(default_factory=program_limits)
    """Limits of the program and everything it starts."""


class HarnessAgent(CommandLineAgent):
    """Runs a known command-line agent."""

    program: str
    install: str
    """Command that installs it."""
    command: str
    """Shell command with the placeholders of `CommandLineOptions.command`, `{program}` and `{arguments}`."""
    variables: ClassVar[Mapping[str, str]] = {}

    def __init__(self, options: HarnessOptions | None = None) -> None:
        given = options or HarnessOptions()
        self._name = given.program or self.program
        self._given = given
        super().__init__(self._options(shlex.quote(self._name), {}))

    def find_program(self) -> InstalledProgram:
        """Find the program on this machine, and use it. Raises `ValueError` if it is not installed."""
        found = find_program(self._name, self.install)
        self.options = self._options(shlex.quote(str(found.path)), {"PATH": found.search_path})
        return found

    def _options(self, program: str, variables: Mapping[str, str]) -> CommandLineOptions:
        command = self.command.replace("{program}", program).replace("{arguments}", self._given.arguments)
        return CommandLineOptions(
            command=f"mkdir -p $HOME && {command}",
            variables={"HOME": HOME, **variables, **self.variables, **self._given.variables},
            limits=self._given.limits,
        )


class ClaudeCode(HarnessAgent):
    """Claude Code, over Anthropic's messages."""

    program = "claude"
    install = "npm install -g @anthropic-ai/claude-code"
    command = "{program} {arguments} --print --dangerously-skip-permissions --model {model} {prompt}"
    variables: ClassVar[Mapping[str, str]] = {
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


class QwenCode(HarnessAgent):
    """Qwen Code, over chat completions."""

    program = "qwen"
    install = "npm install -g @qwen-code/qwen-code"
    command = "{program} {arguments} --yolo --auth-type openai --model {model} {prompt}"


class OpenCode(HarnessAgent):
    """opencode, over chat completions."""

    program = "opencode"
    install = "npm install -g opencode-ai"
    command = "{program} run {arguments} --model tree_rl/{model} {prompt}"
    variables: ClassVar[Mapping[str, str]] = {
        "OPENCODE_CONFIG_CONTENT": (
            '{"provider": {"tree_rl": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": '
            '"{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"}, "models": {"{model}": {}}}}}'
        ),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }


class Codex(HarnessAgent):
    """Codex CLI, over responses."""

    program = "codex"
    install = "npm install -g @openai/codex"
    command = (
        "{program} exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "
        "-c model_provider=tree_rl -c model_providers.tree_rl.name=tree_rl "
        '-c model_providers.tree_rl.base_url="$OPENAI_BASE_URL" '
        "-c model_providers.tree_rl.env_key=OPENAI_API_KEY -c model_providers.tree_rl.wire_api=responses "
        "{arguments} --model {model} {prompt}"
    )


class GeminiCli(HarnessAgent):
    """Gemini CLI, over generateContent."""

    program = "gemini"
    install = "npm install -g @google/gemini-cli"
    command = (
        'mkdir -p $HOME/.gemini && echo \'{"security": {"auth": {"selectedType": "gemini-api-key"}}}\' '
        ">$HOME/.gemini/settings.json && {program} {arguments} --yolo --skip-trust --model {model} --prompt {prompt}"
    )


class Aider(HarnessAgent):
    """aider, over chat completions. It reads the files that `arguments` names, `*.py` for example."""

    program = "aider"
    install = "pip install aider-chat, in a virtual environment of its own"
    command = (
        "{program} --yes-always --no-git --no-check-update --no-show-model-warnings --model openai/{model} "
        "--message {prompt} {arguments}"
    )
    variables: ClassVar[Mapping[str, str]] = {"AIDER_ANALYTICS_DISABLE": "true"}


class OpenHands(HarnessAgent):
    """OpenHands' command line, over chat completions."""

    program = "openhands"
    install = "pip install openhands, in a virtual environment of its own (Python 3.12)"
    command = (
        "LLM_API_KEY=$OPENAI_API_KEY LLM_BASE_URL=$OPENAI_BASE_URL LLM_MODEL=openai/{model} "
        "{program} {arguments} --headless --override-with-envs -t {prompt}"
    )
    variables: ClassVar[Mapping[str, str]] = {"OPENHANDS_SUPPRESS_BANNER": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
