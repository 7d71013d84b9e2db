"""Passes variables of the driver to all processes of its job.

Processes inherit the environment of their node, not the driver's, so a recipe's `PYTHONPATH` or `OMP_NUM_THREADS` would
be lost. Ray calls `carry` in the driver (`RAY_RUNTIME_ENV_HOOK`, set by scripts/cluster/launch.sh).
"""

import os
from collections.abc import Mapping
from typing import Any

CARRIED = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "TOKENIZERS_PARALLELISM", "CUDA_DEVICE_MAX_CONNECTIONS")
CARRIED_PREFIXES = (
    *("GLOO_", "HF_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_"),
    *("TREE_RL_", "TRITON_", "VERL_", "VLLM_", "WANDB_"),
)
SECRETS = ("HF_TOKEN", "HF_HUB_TOKEN", "WANDB_API_KEY")
"""Variables that are not passed, because Ray displays and logs them; users set them on the nodes."""


def carry(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Add this process's variables to the runtime environment of `ray.init`, without overriding its variables."""
    described = {name for name in os.environ if name in CARRIED or name.startswith(CARRIED_PREFIXES)}
    carried = {name: os.environ[name] for name in described.difference(SECRETS)}
    given = dict(runtime_env or {})
    return {**given, "env_vars": {**carried, **(given.get("env_vars") or {})}}
