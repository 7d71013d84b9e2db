"""Reads a command line of verl's programs and composes its config; mistakes become one-line errors."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from tree_rl.extras import MissingExtraError
from tree_rl.inspection.files.terminal import INPUT_ERROR
from tree_rl.verl_plugin.did_you_mean import nearest_key
from tree_rl.verl_plugin.launch.short_forms import CommandLineError
from tree_rl.verl_plugin.options import as_tree_config
from tree_rl.verl_plugin.refusals.refusal import nodes_below

HAS_A_WORD = (
    *("model.use_liger", "trainer.save_freq", "trainer.test_freq"),
    *("tree.max_tokens", "tree.offload", "tree.reuse_log_probs"),
)
"""Suffixes of options that may also be a word, such as `auto` or `after_each_epoch`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program of verl that runs with a composed config."""

    name: str
    """Name of the module after `python -m`."""
    folder: Path
    """Folder to which `--config-path` is relative, as for Hydra."""
    config_name: str
    expand: Callable[[Sequence[str], str], list[str]]
    """Function (overrides, config name) that expands short forms."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandLineError(f"{message}; {self.prog} --help lists what there is")


def read_job(arguments: Sequence[str], program: Program) -> tuple[DictConfig, list[str]]:
    """Read overrides and Hydra's `--config-path` and `--config-name`; return the config and the user's overrides.

    Raises a CommandLineError for a flag, key, value or config that does not exist.
    """
    parser = _Parser(prog=f"python -m {program.name}", allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as verl takes them; tree.KEY; machine=cpu")
    parser.add_argument("--config-path", "-cp", default="config", help="folder of the config")
    parser.add_argument("--config-name", "-cn", default=program.config_name, help="its name there")
    line = parser.parse_intermixed_args(list(arguments))
    name = line.config_name.removesuffix(".yaml")
    overrides = program.expand(line.overrides, name)
    try:
        with initialize_config_dir(str((program.folder / line.config_path).resolve()), version_base=None):
            config = compose_checked(name, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise CommandLineError(one_line(error)) from error
    return config, line.overrides


def compose_checked(config_name: str, arguments: Sequence[str]) -> DictConfig:
    """Compose a config as Hydra, which must be initialized, does.

    Raises a CommandLineError if an argument is no override, or sets a text where the config has a number or a boolean.
    """
    overrides = [_parsed(text) for text in arguments]
    config = compose(config_name, [str(one.input_line) for one in overrides if not _is_value(one)])
    _set_values(config, [one for one in overrides if _is_value(one)])
    return config


def _parsed(text: str) -> Override:
    key, sign, value = text.partition("=")
    if key.lstrip("+") == "tree":
        raise CommandLineError(f"{text}: name an option of trees, such as tree.max_tokens={value}")
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        what = "a value that Hydra cannot read; quote it" if sign else "no KEY=VALUE"
        raise CommandLineError(f"{text}: {what}") from error


def _is_value(override: Override) -> bool:
    """True if an override sets a value of the composed config; others choose config files or configure Hydra."""
    key = override.key_or_group
    is_plain = override.type != OverrideType.DEL and override.package is None and not override.is_sweep_override()
    return is_plain and "." in key and "/" not in key and not key.startswith("hydra.")


def _set_values(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Set values as Hydra does; refuse a text where the config had a number or a boolean."""
    for override in overrides:
        key = override.key_or_group
        before: Any = OmegaConf.select(config, key, default=None)
        try:
            OmegaConf.update(config, key, override.value(), force_add=override.type != OverrideType.CHANGE)
        except (ConfigAttributeError, ConfigKeyError) as error:
            hint = nearest_key(key, keys_of(config)) or "; put + before it to add a key of your own"
            raise CommandLineError(f"{override.input_line}: no such key{hint}") from error
        now = OmegaConf.select(config, key, default=None, throw_on_resolution_failure=False)
        if isinstance(before, bool | int | float) and isinstance(now, str) and not key.endswith(HAS_A_WORD):
            expected = "true or false" if isinstance(before, bool) else "a number"
            raise CommandLineError(f"{key}={now}: expected {expected}")


def check_tree_block(engine: Any, place: str, written: Sequence[str]) -> None:
    """Read the `tree` block of an engine; a CommandLineError names the key that the user wrote."""
    block = None if engine is None else engine.get("tree", None)
    try:
        as_tree_config(OmegaConf.to_container(block, resolve=True) if OmegaConf.is_config(block) else block)
    except ValueError as error:
        message = one_line(error)
        is_short = message.partition("=")[0].partition(":")[0] in written
        raise CommandLineError(message if is_short else message.replace("tree", f"{place}.tree", 1)) from error


@contextmanager
def refusals_as_one_line() -> Iterator[None]:
    """If a check refuses the job, end the program with one line on standard error and exit code 2."""
    try:
        yield
    except (
        *(ValueError, TypeError, AssertionError, OSError, MissingExtraError),
        *(OmegaConfBaseException, HydraException),
    ) as error:
        print(f"tree_rl: {one_line(error)}", file=sys.stderr)
        sys.exit(INPUT_ERROR)


def one_line(error: BaseException) -> str:
    """The message of an error, or of its cause if Hydra wraps it, on one line."""
    while error.__cause__ is not None and isinstance(error, HydraException | OmegaConfBaseException):
        error = error.__cause__
    # Hydra appends a list of the folders in which it searched for a config.
    words = " ".join(str(error).partition("\nConfig search path:")[0].split())
    return words if words else type(error).__name__


def keys_of(config: DictConfig) -> set[str]:
    """Dotted names of all nodes, without resolving values."""
    plain: Any = OmegaConf.to_container(config, resolve=False)
    return {name for name, _ in nodes_below(plain)}
