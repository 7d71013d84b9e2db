"""Every name of verl that is not a documented extension point, and the versions it was checked against.

Names resolve on first use, so that a process pays only for the parts of verl it needs.
"""

import importlib
from importlib.metadata import version
from typing import Any

from packaging.specifiers import SpecifierSet

SUPPORTED_VERL = SpecifierSet(">=0.9.1,<0.10")

PRIVATE_NAMES: dict[str, str] = {
    "BaseEngine": "verl.workers.engine.base",
    "EngineRegistry": "verl.workers.engine.base",
    "FSDPEngineWithLMHead": "verl.workers.engine.fsdp.transformer_impl",
    "FSDPEngineWithValueHead": "verl.workers.engine.fsdp.transformer_impl",
    "detach_tree": "verl.workers.engine.utils",
    "ppo_loss": "verl.workers.utils.losses",
    "sft_loss": "verl.workers.utils.losses",
    "value_loss": "verl.workers.utils.losses",
    "tensordict_utils": "verl.utils",
    "Metric": "verl.utils.metric",
    "AggregationType": "verl.utils.metric",
    "append_to_dict": "verl.utils.py_functional",
    "PrecisionType": "verl.utils.torch_dtypes",
    "get_init_weight_context_manager": "verl.utils.fsdp_utils",
    "get_device_id": "verl.utils.device",
    "get_device_name": "verl.utils.device",
    # Rollout side.
    "_ROLLOUT_REGISTRY": "verl.workers.rollout.base",
    "AgentLoopManagerTQ": "verl.trainer.ppo.v1.agent_loop_tq",
    "AgentLoopWorkerTQ": "verl.trainer.ppo.v1.agent_loop_tq",
    "apply_greedy_sampling_params": "verl.trainer.ppo.v1.agent_loop_tq",
}
"""Private or semi-public names of verl -> the module that defines them."""


def check_verl_version() -> str:
    """The installed verl version.

    Raises:
        ImportError: verl is outside the supported range.
    """
    installed = version("verl")
    if not SUPPORTED_VERL.contains(installed, prereleases=True):
        raise ImportError(
            f"tree_rl supports verl {SUPPORTED_VERL}, found verl {installed}; install a supported version "
            "(pip install 'verl>=0.9.1,<0.10') or set VERL_USE_EXTERNAL_PLUGINS=none to run verl without trees"
        )
    return installed


def __getattr__(name: str) -> Any:
    if name not in PRIVATE_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(PRIVATE_NAMES[name]), name)
