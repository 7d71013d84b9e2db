"""What a driver hands the processes of a cluster that was started before it: the variables that recipes set.

Under `ray.init` alone a worker inherits the driver's environment. On nodes that run already it gets the node's, and a
recipe's `PYTHONPATH` or `OMP_NUM_THREADS` would be lost. Ray calls `carry` (`RAY_RUNTIME_ENV_HOOK`) in the driver.
"""

import os
from collections.abc import Mapping
from typing import Any

CARRIED = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "TOKENIZERS_PARALLELISM", "CUDA_DEVICE_MAX_CONNECTIONS")
CARRIED_PREFIXES = (
    "GLOO_",
    "HF_",
    "NCCL_",
    "OMP_",
    "PYTORCH_",
    "TORCH_",
    "TREE_RL_",
    "TRITON_",
    "VERL_",
    "VLLM_",
    "WANDB_",
)
SECRETS = ("HF_TOKEN", "HF_HUB_TOKEN", "WANDB_API_KEY")
"""Ray shows and logs what it carries: these have to be set on the nodes."""


def carry(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Add this process's variables to a runtime environment; what it names already stays.

    Args:
        runtime_env: the runtime environment given to `ray.init`, in a job merged with the job's.
    """
    carried = {name: value for name, value in os.environ.items() if is_carried(name)}
    given = dict(runtime_env or {})
    return {**given, "env_vars": {**carried, **(given.get("env_vars") or {})}}


def is_carried(name: str) -> bool:
    """Whether a variable of the driver belongs to the run rather than to the machine."""
    return name not in SECRETS and (name in CARRIED or name.startswith(CARRIED_PREFIXES))
