"""Engines in one process: a tiny model on disk, stock verl's FSDP2 engine and ours, rows as verl builds them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from tensordict import TensorDict
from tiny_sizes import sizes
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PretrainedConfig, Qwen3Config
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from tree_rl.benchmark.against_verl.engines import join_process_group
from tree_rl.verl_plugin.engine.build import build_value_module
from tree_rl.verl_plugin.engine.engine import TreeFSDPEngineWithLMHead, TreeFSDPEngineWithValueHead
from tree_rl.verl_plugin.options import TreeConfig, TreeFSDPEngineConfig

VOCAB = 97
FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
BFLOAT16 = {**FLOAT32, "param_dtype": "bf16"}
"""Mixed precision of verl's default, on a GPU."""
LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}
FLAGS = {"calculate_entropy": True, "return_model_output": True}
"""Of a batch whose outputs are compared."""
ALONE = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
"""Of a batch that stock verl runs row by row."""


class StockValueEngine(FSDPEngineWithValueHead):
    """Stock verl's critic; only its loader's hard-wired flash attention is replaced, which no CPU has."""

    def _build_module(self) -> torch.nn.Module:
        return build_value_module(self.model_config, self.engine_config, self.device_mesh)


def tiny_qwen3(**overrides: Any) -> Qwen3Config:
    """A Qwen3 of two layers that runs in milliseconds."""
    usual = sizes(vocab_size=VOCAB, intermediate_size=48, max_position_embeddings=512, pad_token_id=None)
    return Qwen3Config(**{**usual, "tie_word_embeddings": True, **overrides})


def save_model(path: Path, config: PretrainedConfig, *, value: bool = False) -> Path:
    """A random model on disk, as verl loads it."""
    torch.manual_seed(0)
    if value:
        config.num_labels = 1
        model = AutoModelForTokenClassification.from_config(config, attn_implementation="sdpa")
        torch.nn.init.normal_(model.score.weight, std=0.3)
    else:
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    return path


def model_config(path: Path, model_type: str, attention: str = "sdpa", **options: Any) -> HFModelConfig:
    files = {"path": str(path), "load_tokenizer": False, "override_config": {"attn_implementation": attention}}
    return HFModelConfig(**files, model_type=model_type, **{"enable_gradient_checkpointing": False, **options})


def build_engine(
    path: Path,
    *,
    tree: TreeConfig | None,
    value: bool = False,
    attention: str = "sdpa",
    model: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
) -> Any:
    """A tree engine, or stock verl's where `tree` is None, initialised on a model on disk."""
    join_process_group()
    torch.manual_seed(11)  # all engines draw alike what is not on disk: an adapter's first factors, a critic's head
    stock_class = StockValueEngine if value else FSDPEngineWithLMHead
    tree_class = TreeFSDPEngineWithValueHead if value else TreeFSDPEngineWithLMHead
    settings = {"mixed_precision": FLOAT32, "model_dtype": "fp32", "use_torch_compile": False, **(engine or {})}
    shared = dict(strategy="fsdp2", **settings)
    config = FSDPEngineConfig(**shared) if tree is None else TreeFSDPEngineConfig(**shared, tree=tree)
    built = (stock_class if tree is None else tree_class)(
        model_config=model_config(path, "value_model" if value else "language_model", attention, **(model or {})),
        engine_config=config,
        optimizer_config=FSDPOptimizerConfig(**{"lr": 1e-3, "total_training_steps": 10, **(optimizer or {})}),
        checkpoint_config=CheckpointConfig(),
    )
    built.initialize()
    return built


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row: `prompt` tokens of context, then responses with a mask."""

    tokens: list[int]
    prompt: int
    mask: list[int]
    advantage: float = 1.0
    uid: str = "g"
    temperature: float = 1.0


def ppo_batch(rows: list[Row], *, seed: int = 0, max_tokens: int = 100_000, **flags: Any) -> TensorDict:
    """Rows as verl's workers receive them for `update_actor`, with advantages that differ token by token."""
    generator = np.random.default_rng(seed)
    masks = [torch.tensor(row.mask) for row in rows]

    def of_responses(scale: float, *shifts: float) -> torch.Tensor:
        """Noise around a value of each row, or one for all."""
        pairs = zip(rows, shifts * len(rows) if len(shifts) == 1 else shifts, strict=True)
        drawn = (generator.normal(shift, scale, len(row.mask)) for row, shift in pairs)
        return nested([torch.tensor(values, dtype=torch.float32) for values in drawn])

    usual = {"use_remove_padding": True, "use_dynamic_bsz": True}
    usual |= {"max_token_len_per_gpu": max_tokens, "global_batch_size": len(rows)}
    return tu.get_tensordict(
        {
            "input_ids": nested([torch.tensor(row.tokens) for row in rows]),
            "position_ids": nested([torch.arange(len(row.tokens)) for row in rows]),
            "prompts": nested([torch.tensor(row.tokens[: row.prompt]) for row in rows]),
            "responses": nested([torch.tensor(row.tokens[row.prompt :]) for row in rows]),
            "response_mask": nested(masks),
            "loss_mask": nested(masks),
            "old_log_probs": of_responses(0.3, -4.5),
            "ref_log_prob": of_responses(0.3, -4.5),
            "advantages": of_responses(0.3, *(row.advantage for row in rows)),
            "returns": of_responses(1.0, 0.0),
            "values": of_responses(1.0, 0.0),
            "uid": [row.uid for row in rows],
            "temperature": torch.tensor([row.temperature for row in rows]),
        },
        non_tensor_dict={**usual, **flags},
    )


def with_whole_masks(data: TensorDict) -> TensorDict:
    """The rows as verl's SFT loss reads them: a mask over the whole row."""
    pairs = zip(data["input_ids"].unbind(), data["loss_mask"].unbind(), strict=True)
    data["loss_mask"] = nested([torch.cat([mask.new_zeros(len(ids) - len(mask)), mask]) for ids, mask in pairs])
    return data


def nested(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    return {name: whole(one.grad) for name, one in engine.module.named_parameters() if one.grad is not None}


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: whole(one) for name, one in engine.module.named_parameters()}


def whole(sharded: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, all shards of it."""
    return (sharded.full_tensor() if hasattr(sharded, "full_tensor") else sharded).detach().clone()
