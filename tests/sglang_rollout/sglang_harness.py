"""SGLang as verl starts it, on a CPU, and the settings of that which the tests share."""

import sys
from functools import partial
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("rollout", "verl_plugin", "vllm_rollout"))

import vllm_harness

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
    *vllm_harness.ON_A_CPU,
    *(f"+actor_rollout_ref.rollout.engine_kwargs.sglang.{key}={value}" for key, value in ENGINE.items()),
)
environment = partial(vllm_harness.environment, SGLANG_USE_CPU_ENGINE="1")
"""What every process of a run with SGLang on a CPU needs."""
