"""Stock verl's engine as its example script sets it up, and ours beside it, on one random model in one process."""

import socket
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import is_flash_attn_2_available
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

from tree_rl.cost.model_sizes import ModelSize
from tree_rl.inspection.files import InputError
from tree_rl.verl_plugin.compat import FSDPEngineWithLMHead, ppo_loss
from tree_rl.verl_plugin.engine.engine import TreeFSDPEngineWithLMHead
from tree_rl.verl_plugin.options import TreeConfig, TreeFSDPEngineConfig

EXAMPLE = "examples/grpo_trainer/run_qwen3_8b_fsdp.sh"
"""verl's script that is followed (snapshot 1dda039), on FSDP2: on one GPU neither FSDP shards."""
MAX_TOKENS = 24_576
"""Its ppo_max_token_len_per_gpu and log_prob_max_token_len_per_gpu."""
LEARNING_RATE, KL_COEF, KL_TYPE, CLIP = 1e-6, 0.001, "low_var_kl", 0.2
"""Settings of the script (clip: verl's default); its entropy_coeff is 0."""
ATTENTION = {"cuda": "flash_attention_2", "cpu": "sdpa"}
"""verl's default, which no CPU has."""
FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
BFLOAT16 = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
"""verl's default mixed precision, over float32 parameters."""


def flat_attention(asked: str, device: torch.device) -> str:
    """Attention of stock verl: what was asked for, or for "auto" verl's default; an InputError if it is absent."""
    chosen = ATTENTION[device.type] if asked == "auto" else asked
    if chosen == "flash_attention_2" and not is_flash_attn_2_available():
        raise InputError(
            f"--against verl: {EXAMPLE} runs flash_attention_2, and flash-attn is not installed; install it, or "
            "name another attention of transformers with --packed-attention, such as sdpa"
        )
    return chosen


def save_random_model(size: ModelSize, folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> Path:
    """A model with random weights on disk, as verl loads it."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**size.config), dtype=dtype)
    model.save_pretrained(folder)
    return folder


def build_engine(
    path: Path,
    *,
    tree: TreeConfig | None,
    dtype: torch.dtype,
    attention: str = "sdpa",
    checkpointing: bool = True,
    liger: bool = False,
    **more: Any,
) -> Any:
    """An engine under FSDP2, ready to run: stock verl's without `tree`, the options of ours.

    Layers compute in `dtype`, float32 or bfloat16; parameters are float32, verl's default. The script recomputes layers
    in the backward and leaves Liger's out; `attention` is transformers', for rows. `more` are fields of verl's
    `FSDPEngineConfig`.
    """
    join_process_group()
    precision = BFLOAT16 if dtype == torch.bfloat16 else FLOAT32
    compiled = torch.cuda.is_available()
    settings = {"strategy": "fsdp2", "mixed_precision": precision, "use_torch_compile": compiled, **more}
    engine_class = FSDPEngineWithLMHead if tree is None else TreeFSDPEngineWithLMHead
    engine = engine_class(
        model_config=HFModelConfig(
            path=str(path),
            load_tokenizer=False,
            model_type="language_model",
            use_remove_padding=True,
            enable_gradient_checkpointing=checkpointing,
            use_liger=liger,
            override_config={"attn_implementation": attention},
        ),
        engine_config=FSDPEngineConfig(**settings) if tree is None else TreeFSDPEngineConfig(**settings, tree=tree),
        optimizer_config=FSDPOptimizerConfig(lr=LEARNING_RATE, total_training_steps=1000),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def actor_loss() -> Any:
    """verl's PPO loss with the script's KL term."""
    coefficients = {"clip_ratio": CLIP, "entropy_coeff": 0.0, "kl_loss_coef": KL_COEF, "kl_loss_type": KL_TYPE}
    actor = {"strategy": "fsdp2", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "use_kl_loss": True}
    return partial(ppo_loss, config=FSDPActorConfig(**actor, **coefficients))


def join_process_group() -> None:
    """Make a group of this process, as verl's engines expect, unless there is a group."""
    if torch.distributed.is_initialized():
        return
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
