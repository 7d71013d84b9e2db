"""Builds agents and environments from a config: known names, their options, and errors for wrong ones."""

from collections.abc import Mapping
from dataclasses import MISSING, replace
from importlib import import_module
from inspect import get_annotations
from typing import Any, get_args

from tree_rl.extras import MissingExtraError
from tree_rl.option_types import check_options, check_type, refuse_unknown

CONFIG_KEY = "actor_rollout_ref.rollout.custom.gateway_agent.agent_options"
AGENTS: Mapping[str, str] = {
    "react": "tree_rl.rollout.agents.react.ReActAgent",
    "mini_swe": "tree_rl.rollout.agents.mini_swe.MiniSweAgent",
    "claude_code": "tree_rl.rollout.agents.harnesses.ClaudeCode",
    "codex": "tree_rl.rollout.agents.harnesses.Codex",
    "gemini_cli": "tree_rl.rollout.agents.harnesses.GeminiCli",
    "qwen_code": "tree_rl.rollout.agents.harnesses.QwenCode",
    "opencode": "tree_rl.rollout.agents.harnesses.OpenCode",
    "openhands": "tree_rl.rollout.agents.harnesses.OpenHands",
    "aider": "tree_rl.rollout.agents.harnesses.Aider",
    "command_line": "tree_rl.rollout.agents.command_line.CommandLineAgent",
}
ENVIRONMENTS: Mapping[str, str] = {
    "swe": "tree_rl.rollout.environments.swe.SweEnvironment",
    "shell": "tree_rl.rollout.environments.shell_environment.ShellEnvironment",
    "swe_bench_verified": "tree_rl.rollout.environments.benchmarks.named.SweBenchVerified",
    "swe_smith": "tree_rl.rollout.environments.benchmarks.named.SweSmith",
    "swe_gym": "tree_rl.rollout.environments.benchmarks.named.SweGym",
    "r2e": "tree_rl.rollout.environments.benchmarks.named.R2E",
    "terminal_bench": "tree_rl.rollout.environments.benchmarks.named.TerminalBench",
    "openenv": "tree_rl.rollout.environments.adapters.openenv.OpenEnvEnvironment",
    "verifiers": "tree_rl.rollout.environments.adapters.verifiers.VerifiersEnvironment",
}
IN_ENVIRONMENT = "tree_rl.rollout.agents.in_environment.AgentInEnvironment"
TIMEOUT_SECONDS = 900.0
"""Default of `timeout_seconds` of `AgentInEnvironment`."""
ARGUMENTS: Mapping[str, Any] = {
    "agent": "react",
    "options": {},
    "environment": "swe",
    "sandbox": {},
    "environment_options": {},
}
"""Its other arguments and their defaults."""


def build(
    agent: str,
    options: Mapping[str, Any] | None,
    environment: str,
    sandbox: Mapping[str, Any] | None,
    environment_options: Mapping[str, Any] | None = None,
) -> tuple[Any, Any]:
    """Build an agent and an environment for one session from the arguments of `AgentInEnvironment`.

    A local sandbox can read the harness's installation.

    Raises:
        ValueError: an unknown name, field or value, or an agent that is not installed; names the key.
    """
    made = _make("agent", AGENTS, agent, options, "options")
    sandbox = dict(sandbox or {})
    is_local = not environment_options and sandbox.get("backend", "local") == "local"
    if hasattr(made, "find_program") and is_local and _takes_readable(environment, sandbox):
        try:
            found = made.find_program()
        except ValueError as error:
            raise ValueError(f"{CONFIG_KEY}.agent={agent}: {error}") from error
        sandbox["readable"] = (*sandbox.get("readable", ()), *found.readable)
    return made, _make("environment", ENVIRONMENTS, environment, *_of_environment(sandbox, environment_options))


def _takes_readable(environment: str, sandbox: Mapping[str, Any]) -> bool:
    _, taken = _class_and_options("environment", ENVIRONMENTS, environment, sandbox, "sandbox")
    return "readable" in getattr(taken, "__dataclass_fields__", ())


def _of_environment(
    sandbox: Mapping[str, Any] | None, environment_options: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any] | None, str]:
    """The options of an environment, and the argument with them: its sandbox's, or `environment_options`."""
    if sandbox and environment_options:
        raise ValueError(f"{CONFIG_KEY}.environment_options: expected no sandbox with it, received {dict(sandbox)}")
    return (sandbox, "sandbox") if sandbox else (environment_options, "environment_options")


def check(configured: Mapping[str, Any], *, is_this_machine: bool) -> None:
    """Refuse what `build` would refuse, before a job starts.

    Args:
        configured: arguments of `AgentInEnvironment`.
        is_this_machine: True if sessions run on this machine, so that the programs installed here matter.

    Raises:
        ValueError: as `build`, except for classes of the user.
    """
    kinds: dict[str, Any] = {"timeout_seconds": float, **{name: type(default) for name, default in ARGUMENTS.items()}}
    refuse_unknown(CONFIG_KEY, configured, [*ARGUMENTS, "timeout_seconds"])
    for name, value in configured.items():
        check_type(f"{CONFIG_KEY}.{name}", value, kinds[name] | None)
    timeout = configured.get("timeout_seconds")
    if timeout is not None and timeout <= 0:
        raise ValueError(f"{CONFIG_KEY}.timeout_seconds={timeout}: expected more than 0 seconds")
    agent, options, environment, sandbox, own = (configured.get(name) or ARGUMENTS[name] for name in ARGUMENTS)
    if is_this_machine and agent in AGENTS and environment in ENVIRONMENTS:
        build(agent, options, environment, sandbox, own)
        return
    for kind, ours, name, given, place in (
        ("agent", AGENTS, agent, options, "options"),
        ("environment", ENVIRONMENTS, environment, *_of_environment(sandbox, own)),
    ):
        if name in ours or "." not in name:
            _class_and_options(kind, ours, name, given, place)


def _make(kind: str, known: Mapping[str, str], name: str, options: Mapping[str, Any] | None, place: str) -> Any:
    """Construct a class with its options, a dataclass; a nested mapping replaces some of a field's defaults."""
    made, taken = _class_and_options(kind, known, name, options, place)
    if not options:
        return made()
    fields = taken.__dataclass_fields__
    read = {
        name: replace(fields[name].default_factory(), **value)
        if hasattr(fields[name].type, "__dataclass_fields__")
        else value
        for name, value in options.items()
    }
    return made(taken(**read))


def _class_and_options(
    kind: str, known: Mapping[str, str], name: str, options: Mapping[str, Any] | None, place: str
) -> tuple[Any, Any]:
    """A class, and the class of its options by its constructor's annotation; checks names and types of `options`.

    `place` is the argument of `AgentInEnvironment` with these options.
    """
    module, _, class_name = known.get(name, name).rpartition(".")
    if not module:
        raise ValueError(
            f"{CONFIG_KEY}.{kind}={name!r}: expected one of {', '.join(known)}, or a class as package.module.Class"
        )
    try:
        found = getattr(import_module(module), class_name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{kind} {name!r}", (error.name or "").partition(".")[0]) from error
    annotation = get_annotations(found.__init__).get("options")
    taken = [one for one in get_args(annotation) or (annotation,) if hasattr(one, "__dataclass_fields__")]
    key, given = f"{CONFIG_KEY}.{place}", set(options or {})
    if not taken:
        if given:
            raise ValueError(f"{key}: {found.__name__} takes no options, received {sorted(given)}")
        return found, None
    fields = taken[0].__dataclass_fields__
    check_options(key, options or {}, taken[0])
    needed = [one.name for one in fields.values() if one.default is MISSING and one.default_factory is MISSING]
    if missing := [one for one in needed if one not in given]:
        raise ValueError(f"{key}.{missing[0]}: expected a value; {name} has no default for it")
    for option, value in (options or {}).items():
        if hasattr(fields[option].type, "__dataclass_fields__"):
            check_options(f"{key}.{option}", value, fields[option].type)
    return found, taken[0]
