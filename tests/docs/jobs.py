"""Command lines of verl's programs in the documents: composed by Hydra, and checked as a job is before Ray starts."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from flag_checks import environment
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from shell_blocks import ROOT, Command

from tree_rl.rollout.agents import harnesses
from tree_rl.verl_plugin.launch.command_line import read_job
from tree_rl.verl_plugin.launch.dpo import PROGRAM as DPO
from tree_rl.verl_plugin.launch.train import PROGRAM, checked
from tree_rl.verl_plugin.refusals.refusal import Of
from tree_rl.verl_plugin.refusals.table import TABLE

STAND_IN = """#!/bin/bash
# Stands for python in a recipe's script: notes the arguments of a job, and makes what a program would write.
if [[ $1 == -m && "$*" != *tree_rl* ]]; then
    touch "$3/tasks.parquet"
    set -- "" "$3/model"
elif [[ $1 == -m ]]; then
    printf '%s\\0' "$@" >"$NOTED/$(ls "$NOTED" | wc -l)"
    for argument in "$@"; do
        case $argument in
            trainer.default_local_dir=*) folder=${argument#*=} ;;
            trainer.total_training_steps=*) folder=$folder/global_step_${argument#*=}/huggingface ;;
        esac
    done
    set -- "" "$folder"
fi
mkdir -p "$2" && touch "$2"/{train,test,sft,experts}.parquet && cp "$CONFIG" "$2/config.json"
"""
"""The scripts call whatever PYTHON names."""
CONFIG = '{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}'
AGENT_OPTIONS = "actor_rollout_ref.rollout.custom.gateway_agent.agent_options"
PARTS_OF_A_CONFIG = {"agent_options": ("swe_grpo", "swe_grpo", AGENT_OPTIONS), "engine": ("sft", "tree_sft", "engine")}
"""First name of an override that is shown alone -> recipe and config that have it, and where."""


def jobs_of(command: Command, folder: Path) -> list[list[str]]:
    """The arguments of every job that a recipe's script starts for a reader in `folder`."""
    noted, config = folder / "noted", folder / "given.json"
    for made in (noted, folder / "bin"):
        made.mkdir()
    for name, text in (("python", STAND_IN), *((program, "#!/bin/sh\n") for program in programs())):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    for written in (config, folder / "config.json"):
        written.write_text(CONFIG)
    variables = {name: re.sub(r"\$\w+", "1", value) for name, value in command.variables}  # of a loop
    for name in {"TRAIN_FILE", "TEST_FILE"} & set(variables):
        (folder / variables[name]).touch()
    if "MODEL_PATH" in variables:
        variables["MODEL_PATH"] = str(folder)
    variables |= {"PYTHON": str(folder / "bin" / "python"), "NOTED": str(noted), "CONFIG": str(config)}
    variables["PATH"] = f"{folder / 'bin'}{os.pathsep}{environment()['PATH']}"
    words = [str(ROOT / word) if word.startswith("recipes/") else word for word in command.words]
    shell = {**environment(), **variables}
    done = subprocess.run(words, cwd=folder, env=shell, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [path.read_text().split("\0")[:-1] for path in sorted(noted.iterdir())]


def programs() -> Sequence[str]:
    """Names of the harnesses' programs, which the driver looks for."""
    kinds = (getattr(kind, "harness", None) for kind in vars(harnesses).values())
    return [kind.program for kind in kinds if kind is not None]


def check_recipe(command: Command, folder: Path) -> None:
    """Raises a ValueError or Hydra's error for an override that the recipe's config does not take."""
    for arguments in jobs_of(command, folder):
        if "dpo" in arguments:
            read_job(arguments[arguments.index("dpo") + 1 :], DPO)
        elif "tree_rl.sft" in arguments:
            overrides = arguments[arguments.index("--config-name") + 2 :]
            compose_recipe("sft", "tree_sft", overrides)
        else:
            check_train(arguments[2:])


def check_train(arguments: Sequence[str]) -> None:
    """Raises a ValueError as a job's driver would."""
    config, given = read_job(arguments, PROGRAM)
    recipes = patch.object(sys, "path", [str(ROOT / "recipes"), *sys.path])
    # The reader's machine has the GPUs, packages and weights that the page asks for.
    with recipes, patch.dict(TABLE, {Of.MACHINE: (), Of.MODEL_FILES: ()}):
        assert checked(config, given), "the job trains on trees"


def compose_recipe(recipe: str, config: str, overrides: list[str]) -> None:
    """Raises Hydra's error for an override that the recipe's config does not take."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "recipes" / recipe), version_base=None):
        compose(config, overrides=overrides)


def check_overrides(command: Command) -> None:
    """Raises Hydra's error for an override, shown without its program, that no config takes."""
    first = command.words[0].lstrip("+").partition(".")[0]
    recipe, config, place = PARTS_OF_A_CONFIG.get(first, ("grpo", "tree_grpo", first))
    compose_recipe(recipe, config, [word.replace(first, place, 1) for word in command.words])


def check_job_of(command: Command, folder: Path) -> None:
    """Raises a ValueError or Hydra's error for what the job of a command would refuse."""
    if command.words[0] == "bash":
        check_recipe(command, folder)
    elif "=" in command.words[0]:
        check_overrides(command)
    else:
        shown = [word for word in command.words[3:] if "=" in word]
        mode = [] if any("trainer_mode" in word for word in shown) else ["trainer.v1.trainer_mode=tree_sync"]
        check_train(on_this_machine([*mode, *shown], folder))


def on_this_machine(shown: Sequence[str], folder: Path) -> list[str]:
    """Arguments of a job with files and a model that exist, on a CPU where they do not say otherwise."""
    (folder / "rows.parquet").touch()
    (folder / "config.json").write_text(CONFIG)
    files = [f"data.{name}_files={folder}/rows.parquet" for name in ("train", "val")]
    return ["machine=cpu", "algorithm.adv_estimator=grpo", *shown, *files, f"actor_rollout_ref.model.path={folder}"]
