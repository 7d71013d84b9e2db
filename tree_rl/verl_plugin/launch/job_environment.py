"""Wraps the function that gives verl's driver, just before Ray starts, the environment of a job's processes.

It checks the job, and lets each process of a tree job load the plugin in the driver's version. verl finds an installed
plugin by its entry point, which code uploaded by Ray lacks, and hides errors of its import. With
`VERL_USE_EXTERNAL_MODULES` the plugin is loaded in both cases and errors are shown.
"""

import functools
import json
from collections.abc import Callable, Mapping
from os import environ
from typing import Any

from hydra.core.hydra_config import HydraConfig

from tree_rl import __version__
from tree_rl.verl_plugin.compat import constants_ppo
from tree_rl.verl_plugin.launch.asked_for_trees import asks_for_trees, trains_trees
from tree_rl.verl_plugin.launch.session_agent import refuse_unknown_agent
from tree_rl.verl_plugin.launch.session_network import refuse_open_ray
from tree_rl.verl_plugin.plugin_presence import JOB_VERSION, PLUGIN

MODULES = "VERL_USE_EXTERNAL_MODULES"
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable with the runtime environment of a submitted job; Ray refuses to set its variables again."""


def plugin_variables(own: Mapping[str, str]) -> dict[str, str]:
    """Variables for the job's processes; keeps the modules in the driver's `VERL_USE_EXTERNAL_MODULES`."""
    modules = [name for name in own.get(MODULES, "").split(",") if name]
    wanted = {MODULES: ",".join(modules if PLUGIN in modules else [*modules, PLUGIN]), JOB_VERSION: __version__}
    submitted = json.loads(own.get(SUBMITTED, "{}")).get("runtime_env") or {}
    return {name: value for name, value in wanted.items() if name not in (submitted.get("env_vars") or {})}


def forwarding(get_runtime_env: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """verl's function, plus the plugin's variables for a tree job; the user's `ray_init.runtime_env` overrides them.

    First completes and checks a job on trees that verl's main runs. Ends the program with one line and exit code 2 if
    sessions could reach a Ray without authentication, or if none could start.
    """

    @functools.wraps(get_runtime_env)
    def with_plugin(config: Any = None) -> dict[str, Any]:
        # `python -m tree_rl.train` has checked already and never initialises HydraConfig. A key `tree` at the top of
        # the config is always a mistake.
        if config is not None and HydraConfig.initialized() and (trains_trees(config) or "tree" in config):
            # Imported here, because it imports verl's algorithms, which other jobs may not need in this process.
            from tree_rl.verl_plugin.launch.train import make_ready_for_main_ppo

            make_ready_for_main_ppo(config, HydraConfig.get())
        from tree_rl.verl_plugin.launch.command_line import refusals_as_one_line

        with refusals_as_one_line():
            refuse_unknown_agent(config)
            refuse_open_ray(config, environ)
        runtime_env = get_runtime_env(config)
        if config is not None and asks_for_trees(config):
            runtime_env["env_vars"] |= plugin_variables(environ)
        return runtime_env

    return with_plugin


constants_ppo.get_ppo_ray_runtime_env = forwarding(constants_ppo.get_ppo_ray_runtime_env)
