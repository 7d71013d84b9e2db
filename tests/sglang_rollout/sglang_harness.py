"""SGLang as verl starts it, on a CPU, and the settings of that which the tests share."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / folder) for folder in ("rollout", "verl_plugin", "vllm_rollout")]

ENGINE = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    # The packages that force an answer's format are not installed, and the gateway refuses to force one.
    "grammar_backend": "none",
    # A CPU has no memory of an accelerator to give back between rollout and update.
    "enable_memory_saver": False,
    # Otherwise half of the machine's memory becomes cache.
    "max_total_tokens": 20_000,
}
"""rollout.engine_kwargs.sglang: arguments of SGLang's server that verl passes on."""
ROLLOUT_OVERRIDES = (
    "actor_rollout_ref.rollout.name=sglang",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.enforce_eager=true",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    "actor_rollout_ref.rollout.free_cache_engine=false",
    *(f"+actor_rollout_ref.rollout.engine_kwargs.sglang.{key}={value}" for key, value in ENGINE.items()),
)


def environment() -> Mapping[str, str]:
    """What every process of a run with SGLang on a CPU needs."""
    return {
        # As in this process, which may have started Ray's parts already.
        "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
    }
