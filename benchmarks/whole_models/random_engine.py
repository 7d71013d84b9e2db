"""verl's FSDP2 engine with trees on random weights that every rank draws for its own shard: no file, no host copy."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed
from accelerate import init_empty_weights
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tree_rl.benchmark.against_packed.random_model import CONFIGS
from tree_rl.benchmark.against_verl.engines import BFLOAT16, FLOAT32, initialized
from tree_rl.benchmark.model_sizes import ModelSize
from tree_rl.models.routers.trace import RouterHooks
from tree_rl.verl_plugin.compat import transformer_impl
from tree_rl.verl_plugin.engine.engine import TreeFSDPEngineWithLMHead
from tree_rl.verl_plugin.options import TreeConfig

STD = 0.02
"""Standard deviation of all matrices, transformers' `initializer_range`; norms are 1."""
BYTES_PER_PARAMETER = 16
"""Float32 weight and gradient, two moments of AdamW."""


class RandomWeightsEngine(TreeFSDPEngineWithLMHead):
    """The tree engine on the weights of `draw_shards`; its flat mode is stock verl on the same weights."""

    def _stock_module(self) -> nn.Module:
        with patch.object(AutoModelForCausalLM, "from_pretrained", _without_weights):
            module = super()._stock_module()
        if getattr(self.model_config.hf_config, "num_experts", 0):
            # The gradient check decides which experts a token visits.
            RouterHooks(module)
            if self.engine_config.mixed_precision == FLOAT32:
                # The grouped kernels are made for half precision.
                module.set_experts_implementation("eager")
        return module

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        with patch.object(transformer_impl, "fsdp2_load_full_state_dict", draw_shards):
            return super()._build_fsdp_module(module)


def build_engine(
    size: ModelSize,
    folder: Path,
    *,
    is_exact: bool,
    flat_attention: str,
    liger: bool,
    offload: bool,
    fused_adamw: bool = False,
    learning_rate: float = 1e-6,
) -> RandomWeightsEngine:
    """An initialised engine, sharded over all ranks; the weights are the same each time.

    Args:
        size: of the model; head and embedding are apart.
        folder: where the config is written.
        is_exact: compute in float32 with transformers' layers, as the yardstick of gradients.
        flat_attention: of transformers, for rows without trees.
        liger: Liger's fused layers.
        offload: verl's `offload_policy`: weights, gradients and moments in host memory.
        fused_adamw: AdamW as one kernel; without: verl's default, a kernel for each term.
        learning_rate: of AdamW.
    """
    on_gpu = torch.cuda.is_available()
    if torch.distributed.get_rank() == 0:
        module = module_without_weights(size)
        module.config.architectures = [type(module).__name__]
        module.config.save_pretrained(folder)
    torch.distributed.barrier()
    engine: RandomWeightsEngine = initialized(
        RandomWeightsEngine,
        folder,
        tree=TreeConfig(mode="tree", self_check=False, offload=False),
        attention="sdpa" if is_exact else flat_attention,
        liger=liger and not is_exact,
        learning_rate=learning_rate,
        optimizer_settings={"fused": True} if fused_adamw else None,
        mixed_precision=BFLOAT16 if on_gpu and not is_exact else FLOAT32,
        use_torch_compile=on_gpu,
        offload_policy=offload,
        # Unsharded float32 gradients of a 32B model are 131 GB on every GPU.
        use_no_sync_for_gradient_accumulation=False,
    )
    return engine


def draw_shards(model: nn.Module, full_state: object, device_mesh: object = None, cpu_offload: object = None) -> None:
    """Give a sharded module without weights those of this rank's shards; as verl's `fsdp2_load_full_state_dict`.

    The draw depends on the parameter's place in the model and on the rank alone.
    """
    rank = torch.distributed.get_rank()
    gpu = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu" if cpu_offload is not None else gpu)
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer.to(gpu))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if shard.ndim == 1:
                shard.fill_(1.0)
            else:
                draw = torch.Generator(shard.device).manual_seed(1009 * index + rank)
                shard.normal_(0.0, STD, generator=draw)


def state_bytes(size: ModelSize) -> int:
    """Bytes of weights, gradients and moments of all ranks together."""
    return BYTES_PER_PARAMETER * sum(parameter.numel() for parameter in module_without_weights(size).parameters())


def module_without_weights(size: ModelSize) -> Any:
    """transformers' model, its head and embedding apart; parameters take no memory."""
    return _without_weights(config=CONFIGS[size.family](**size.config() | {"tie_word_embeddings": False}))


@contextmanager
def mode_of(engine: RandomWeightsEngine, mode: str) -> Iterator[None]:
    """Run the engine's calls in another `tree.mode`: `flat` is stock verl."""
    before = engine.tree_config
    engine.tree_config = replace(before, mode=mode)
    try:
        yield
    finally:
        engine.tree_config = before


def _without_weights(*, config: Any, torch_dtype: torch.dtype = torch.float32, **_: Mapping[str, object]) -> nn.Module:
    """In place of transformers' `from_pretrained`: parameters without memory, buffers with their values."""
    with init_empty_weights(include_buffers=False):
        module: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)
    return module
