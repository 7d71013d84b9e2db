"""verl's config as Hydra is about to compose it, before Hydra does; a mistake in it as one line."""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from tree_rl.verl_plugin.did_you_mean import did_you_mean, nearest_key

RUNS_NO_JOB = ("help", "hydra_help", "version", "show_defaults", "cfg", "info", "multirun", "shell_completion")
"""Options of Hydra with which a program prints something, or runs several jobs."""

CHOICES = {
    "trainer.v1.trainer_mode": "tree_",
    "actor_rollout_ref.model.model_type": "tree_",
    "critic.model.model_type": "tree_",
    "actor_rollout_ref.rollout.name": "hf",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class": "tree_rl.",
}
"""Config key -> beginning of the values that need the plugin."""

TRAINS = tuple(key for key, start in CHOICES.items() if start == "tree_")
"""Those of them that choose a trainer or an engine."""


class CommandLineError(ValueError):
    """A command line that no job can run; the message is one line and names what to write instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandLine:
    """What Hydra reads from a program's arguments."""

    program: str
    """Path of the file with Hydra's main function."""

    config_path: str
    config_dir: str | None
    config_name: str
    overrides: tuple[str, ...]


def read_command_line(arguments: Sequence[str], *, config_path: str, config_name: str) -> CommandLine | None:
    """Read `sys.argv` with Hydra's own parser; None where no single job would run.

    Args:
        arguments: the program's path, then what follows it.
        config_path: of the program's `hydra.main`.
        config_name: of the program's `hydra.main`.

    Raises:
        CommandLineError: a flag that Hydra does not have, in a line that says something about trees.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            parsed = get_args_parser().parse_args(list(arguments[1:]))
    except SystemExit as ended:
        if ended.code and any("tree" in argument for argument in arguments[1:]):
            raise CommandLineError(said.getvalue().strip().splitlines()[-1].partition("error: ")[2]) from ended
        return None
    if any(getattr(parsed, name, None) for name in RUNS_NO_JOB):
        return None
    return CommandLine(
        program=arguments[0],
        config_path=parsed.config_path or config_path,
        config_dir=parsed.config_dir,
        config_name=(parsed.config_name or config_name).removesuffix(".yaml"),
        overrides=tuple(parsed.overrides),
    )


def asks_for_trees(config: Any) -> bool:
    """Whether a verl config names something that only the plugin provides."""
    return any(str(OmegaConf.select(config, key, default="")).startswith(start) for key, start in CHOICES.items())


def trains_trees(config: DictConfig) -> bool:
    """Whether a config chooses a tree trainer or a tree engine."""
    return any(str(OmegaConf.select(config, key, default="")).startswith("tree") for key in TRAINS)


def compose(line: CommandLine, overrides: Sequence[str]) -> DictConfig:
    """The config of a command line with these overrides.

    Raises:
        HydraException: as Hydra itself would.
    """
    path = create_automatic_config_search_path(line.program, None, line.config_path)
    if line.config_dir is not None:
        path.prepend(provider="command-line", path=f"file://{line.config_dir}")
    GlobalHydra.instance().clear()
    try:
        hydra = Hydra.create_main_hydra2(task_name="early_check", config_search_path=path)
        config = hydra.compose_config(line.config_name, list(overrides), RunMode.RUN)
    finally:
        GlobalHydra.instance().clear()
    with open_dict(config):
        del config["hydra"]
    return config


def explain(error: Exception, line: CommandLine, overrides: Sequence[str]) -> CommandLineError:
    """One line about what Hydra refuses: the first argument that is no override or names no key, else Hydra's words."""
    for override in overrides:
        try:
            OverridesParser.create().parse_override(override)
        except HydraException:
            what = "no KEY=VALUE" if "=" not in override else "a value that Hydra cannot read; quote it"
            return CommandLineError(f"{override}: {what}")
    try:
        stock = compose(line, [text for text in overrides if is_of_hydra(text)])
    except HydraException:
        return CommandLineError(one_line(error))
    known = keys_of(stock)
    groups = {"machine", "model_engine"}
    for override in overrides:
        key, _, value = override.partition("=")
        bare = key.lstrip("~")
        if key.startswith("+") or is_of_hydra(override) or bare in known or bare in groups:
            continue
        if bare == "tree":
            return CommandLineError(f"tree={value}: name an option of trees, such as tree.max_tokens={value}")
        hint = nearest_key(bare, known) or "; put + before it to add a key of your own"
        if "." not in bare and not hint.startswith("; did"):
            hint = did_you_mean(bare, [*known, *groups]) or hint
        return CommandLineError(f"{override}: no such key{hint}")
    return CommandLineError(one_line(error))


def one_line(error: BaseException) -> str:
    """The words of an error, of the innermost cause where a library wraps it, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    # Hydra lists where it looked for a config.
    words = " ".join(str(error).partition("\nConfig search path:")[0].split())
    return words if words else type(error).__name__


def is_of_hydra(override: str) -> bool:
    """Whether an override is about Hydra itself, such as where it looks for configs."""
    return override.lstrip("+~").startswith("hydra.")


def keys_of(config: DictConfig) -> set[str]:
    """Dotted names of all nodes; values are not resolved."""
    found: set[str] = set()

    def walk(node: Any, before: str) -> None:
        for name, value in node.items():
            found.add(f"{before}{name}")
            if isinstance(value, dict):
                walk(value, f"{before}{name}.")

    walk(OmegaConf.to_container(config, resolve=False), "")
    return found
