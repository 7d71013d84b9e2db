"""The only part of tree_rl that imports verl, ray and vllm.

verl imports it in every process (entry point `verl.plugins`). Each part registers when verl imports the module that it
extends, so a process imports only what it uses.
"""

import os
from functools import partial
from importlib import import_module
from types import ModuleType

from tree_rl.extras import require_modules

require_modules(__name__, "verl", "wrapt")

from wrapt import when_imported

from tree_rl.verl_plugin.compat import check_verl_version
from tree_rl.verl_plugin.plugin_presence import check_job_version

check_verl_version()
check_job_version(os.environ)

REGISTRATIONS = {
    "verl.workers.engine": "tree_rl.verl_plugin.engine.engine",
    "verl.workers.rollout.replica": "tree_rl.verl_plugin.embedded_rollout.registration",
    "verl.workers.rollout.base": "tree_rl.verl_plugin.embedded_rollout.registration",
    "verl.experimental.agent_loop": "tree_rl.verl_plugin.agent_loops.tool_agent_loop",
    "verl.experimental.agent_loop.agent_loop": "tree_rl.verl_plugin.agent_loops.gateway_agent_loop",
    "verl.trainer.constants_ppo": "tree_rl.verl_plugin.launch.job_environment",
    "verl.trainer.ppo.core_algos": "tree_rl.verl_plugin.trainer.estimator_names",
    "verl.trainer.ppo.v1": "tree_rl.verl_plugin.trainer.trainers",
    "vllm.model_executor.layers.utils": "tree_rl.verl_plugin.cpu.vllm_cpu",
    "vllm.model_executor.models.utils": "tree_rl.verl_plugin.vllm_adapters",
}
"""Our modules that register themselves, by the module of verl or vLLM after whose import we import them."""


def _load(our_module: str, _: ModuleType) -> None:
    import_module(our_module)


import_module("tree_rl.verl_plugin.cpu.platform_cpu")
for _verl_module, _our_module in REGISTRATIONS.items():
    when_imported(_verl_module)(partial(_load, _our_module))
