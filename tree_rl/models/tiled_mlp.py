"""Runs the MLP and norms of a dense decoder layer in tiles of tokens, so that intermediate values exist for one tile.

The backward runs each tile forward again and sums weight gradients over tiles in float32. With gradient checkpointing
the only extra cost is the last projection's product, because recomputing a layer stops before its MLP.
Legend: N tokens, n tokens of a tile, C hidden size.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.distributed.fsdp import FSDPModule

from tree_kernels.accumulation import accumulation_dtype
from tree_rl.models.language_model import language_model
from tree_rl.models.own_forwards import own_forward
from tree_rl.models.recurrent.layers import ReplacedDuringCalls

KEYWORD = "mlp_tile_tokens"
"""Keyword of a model's forward that carries the tokens per tile to every layer."""
MLPS = ("mlp", "feed_forward", "mixer")
"""Attributes in which decoder layers hold their MLP."""
NORMS = ("RMSNorm", "LayerNorm")
"""Suffixes of the class names of norms."""
ROUTED = ("expert", "router", "moe")
"""Parts of the names of modules with experts."""

TokenWise = Callable[[torch.Tensor], torch.Tensor]
"""A forward that acts on each token separately; input and output [1, N, C]."""


def use_tiled_mlp(model: nn.Module) -> None:
    """Let the dense decoder layers of `model` run in tiles in calls with the keyword `mlp_tile_tokens`."""
    for layer in tileable_layers(model):
        ReplacedDuringCalls(layer, _parts(layer), _tiled_forward, KEYWORD)


def tileable_layers(model: nn.Module) -> list[nn.Module]:
    """Decoder layers with a dense MLP, in order."""
    return [module for module in language_model(model).modules() if _mlp(module) is not None]


def runs_in_tiles(model: nn.Module) -> bool:
    """True if `model` has dense layers, none of whose tiled parts is an FSDP unit of its own."""
    layers = tileable_layers(model)
    return bool(layers) and not any(_is_sharded(part) for layer in layers for part in _parts(layer))


def _is_sharded(part: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in part.modules())


def _mlp(layer: nn.Module) -> nn.Module | None:
    found = (getattr(layer, name, None) for name in MLPS)
    mlp = next((one for one in found if isinstance(one, nn.Module)), None)
    # An MLP that also reads the layer's number has other weights in each layer (Zamba 2).
    if mlp is None or not type(mlp).__name__.endswith("MLP") or _num_inputs(mlp) > 1:
        return None
    routed = any(word in name for name, _ in layer.named_modules() for word in ROUTED)
    return None if routed else mlp


def _num_inputs(module: nn.Module) -> int:
    return len(inspect.signature(own_forward(type(module))).parameters) - 1


def _parts(layer: nn.Module) -> list[nn.Module]:
    """Modules of a layer that act on each token separately."""
    norms = [module for module in layer.children() if type(module).__name__.endswith(NORMS)]
    mlp = _mlp(layer)
    return norms if mlp is None else [*norms, mlp]


def _tiled_forward(part: nn.Module, tile_tokens: int, *_: object) -> dict[str, Any]:
    """The attribute to replace during a layer's call; none with dropout, which would differ in recomputed tiles."""
    has_dropout = any(isinstance(module, nn.Dropout) and module.p > 0 and module.training for module in part.modules())
    return {} if has_dropout else {"forward": partial(tiled, part, part.forward, tile_tokens)}


def tiled(part: nn.Module, forward: TokenWise, tile_tokens: int, x_1NC: torch.Tensor) -> torch.Tensor:
    """`forward(x_1NC)` in tiles.

    Args:
        part: module whose parameters `forward` reads.
        forward: acts on each token separately.
        tile_tokens: most tokens of a tile.
        x_1NC: input of `forward`.

    Raises:
        ValueError: `tile_tokens` is below 1, or the part is an FSDP unit of its own.
    """
    if tile_tokens < 1:
        raise ValueError(f"{KEYWORD}: expected at least 1 token, received {tile_tokens}")
    if x_1NC.shape[-2] <= tile_tokens:
        return forward(x_1NC)
    if _is_sharded(part):
        raise ValueError(
            f"{type(part).__name__} is sharded by itself and would be gathered once per tile; let FSDP wrap whole "
            "decoder layers (fsdp_config.wrap_policy)"
        )
    parameters = _trained(part)
    if not torch.is_grad_enabled() or not (x_1NC.requires_grad or parameters):
        return _run_tiles(forward, tile_tokens, x_1NC)
    kept = _Kept()
    x_1NC = _Keep.apply(kept, x_1NC, *parameters[:1])
    out: torch.Tensor = _Tiles.apply(kept, part, forward, tile_tokens, x_1NC, *parameters)
    return out


class _Kept:
    """Gives the backward of the tiles their input."""

    node: FunctionCtx

    def read(self) -> torch.Tensor:
        """The input [1, N, C]; with checkpointing this recomputes the layer up to it."""
        (x_1NC,) = self.node.saved_tensors  # type: ignore[attr-defined]
        return x_1NC


class _Keep(torch.autograd.Function):
    """Saves the input before the tiles run, so that a recomputation of the layer can stop before them."""

    @staticmethod
    def forward(ctx: Any, kept: _Kept, x_1NC: torch.Tensor, *trained: torch.Tensor) -> torch.Tensor:
        """Identity. A trained parameter as argument gives it a graph node even if the input needs no gradient."""
        ctx.save_for_backward(x_1NC)
        ctx.num_trained = len(trained)
        kept.node = ctx
        return x_1NC.view_as(x_1NC)

    @staticmethod
    def backward(ctx: Any, grad_1NC: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Pass the gradient through."""
        return None, grad_1NC, *[None] * ctx.num_trained


class _Tiles(torch.autograd.Function):
    """A token-wise forward over tiles; saves nothing, its backward reads what `_Keep` saved."""

    @staticmethod
    def forward(
        ctx: Any,
        kept: _Kept,
        part: nn.Module,
        forward: TokenWise,
        tile_tokens: int,
        x_1NC: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        """Run all tiles without a graph."""
        ctx.kept, ctx.part, ctx.run, ctx.tile_tokens = kept, part, forward, tile_tokens
        device = x_1NC.device.type
        ctx.autocast = {"dtype": torch.get_autocast_dtype(device), "enabled": torch.is_autocast_enabled(device)}
        with torch.autocast(device, cache_enabled=False, **ctx.autocast):
            return _run_tiles(forward, tile_tokens, x_1NC)

    @staticmethod
    def backward(ctx: Any, grad_1NC: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """For each tile: forward with a graph, then backward."""
        x_1NC = ctx.kept.read()
        # Read from the module, because under FSDP2 these are the parameters that are gathered now.
        parameters = _trained(ctx.part)
        sums = [torch.zeros_like(p, dtype=accumulation_dtype(p.dtype)) for p in parameters]
        grad_x_1NC = torch.empty_like(x_1NC)
        for tile in _tiles(x_1NC.shape[-2], ctx.tile_tokens):
            x_1nC = x_1NC[..., tile, :].detach().requires_grad_()
            # No autocast cache: it would give this graph weights that were cast under no_grad.
            with torch.enable_grad(), torch.autocast(x_1NC.device.type, cache_enabled=False, **ctx.autocast):
                out_1nC = ctx.run(x_1nC)
            wanted = (x_1nC, *parameters)
            grad_x_1nC, *grads = torch.autograd.grad(out_1nC, wanted, grad_1NC[..., tile, :])
            grad_x_1NC[..., tile, :] = grad_x_1nC
            for total, grad in zip(sums, grads, strict=True):
                total += grad
        grads_of_parameters = [total.to(p.dtype) for total, p in zip(sums, parameters, strict=True)]
        return None, None, None, None, grad_x_1NC, *grads_of_parameters


def _run_tiles(forward: TokenWise, tile_tokens: int, x_1NC: torch.Tensor) -> torch.Tensor:
    out_1NC: torch.Tensor | None = None
    for tile in _tiles(x_1NC.shape[-2], tile_tokens):
        out_1nC = forward(x_1NC[..., tile, :])
        if out_1NC is None:
            out_1NC = out_1nC.new_empty(*x_1NC.shape[:-1], out_1nC.shape[-1])
        out_1NC[..., tile, :] = out_1nC
    assert out_1NC is not None
    return out_1NC


def _tiles(num_tokens: int, tile_tokens: int) -> Iterator[slice]:
    return (slice(start, min(start + tile_tokens, num_tokens)) for start in range(0, num_tokens, tile_tokens))


def _trained(part: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in part.parameters() if parameter.requires_grad]
