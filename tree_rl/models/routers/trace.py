"""Records and replays the routes of Mixture-of-Experts layers.

A trace is passed as the keyword `router_trace` of a model's forward, so gradient checkpointing replays it too.
Legend: N tokens of a forward, L decoder layers, E experts of a layer, K experts per token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tree_rl.models.language_model import language_model
from tree_rl.models.routers.merge_routes import NATIVE
from tree_rl.models.support import UnsupportedModelError

KEYWORD = "router_trace"

Scores = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps a router, its logits [N, E] and the chosen experts [N, K] to the weights [N, K] of the experts' outputs."""


def _softmax_scores(router: Any, logits_NE: torch.Tensor, chosen_NK: torch.Tensor) -> torch.Tensor:
    scores_NK = torch.softmax(logits_NE, dim=-1, dtype=torch.float).gather(1, chosen_NK)
    # Qwen3.5's router always normalises and has no such attribute.
    if getattr(router, "norm_topk_prob", True):
        scores_NK = scores_NK / scores_NK.sum(dim=-1, keepdim=True)
    return scores_NK.to(logits_NE.dtype)


def _mixtral_scores(router: Any, logits_NE: torch.Tensor, chosen_NK: torch.Tensor) -> torch.Tensor:
    scores_NK = torch.softmax(logits_NE.float(), dim=-1).gather(1, chosen_NK)
    return scores_NK / scores_NK.sum(dim=-1, keepdim=True)


def _gpt_oss_scores(router: Any, logits_NE: torch.Tensor, chosen_NK: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits_NE.gather(1, chosen_NK), dim=1, dtype=logits_NE.dtype)


def _scaled_softmax_scores(block: Any, logits_NE: torch.Tensor, chosen_NK: torch.Tensor) -> torch.Tensor:
    scores_NK = torch.softmax(logits_NE, dim=-1, dtype=torch.float32).gather(1, chosen_NK)
    return scores_NK * block.routed_scaling_factor


def _sigmoid_scores(block: Any, logits_NE: torch.Tensor, chosen_NK: torch.Tensor) -> torch.Tensor:
    scores_NK = logits_NE.sigmoid().gather(1, chosen_NK)
    if block.norm_topk_prob:
        scores_NK = scores_NK / (scores_NK.sum(dim=-1, keepdim=True) + 1e-20)
    return scores_NK * block.routed_scaling_factor


SCORES: dict[str, Scores] = {
    "Qwen2MoeTopKRouter": _softmax_scores,
    "Qwen3MoeTopKRouter": _softmax_scores,
    "Qwen3NextTopKRouter": _softmax_scores,
    "OlmoeTopKRouter": _softmax_scores,
    "Qwen3_5MoeTopKRouter": _softmax_scores,
    "MixtralTopKRouter": _mixtral_scores,
    "GptOssTopKRouter": _gpt_oss_scores,
}
"""Weights of experts' outputs for transformers' softmax top-k routers, which return (logits, scores, experts)."""
BLOCK_SCORES: dict[str, Scores] = {
    "DeepseekV2Moe": _scaled_softmax_scores,
    "DeepseekV3MoE": _sigmoid_scores,
    "Glm4MoeMoE": _sigmoid_scores,
    "Glm4MoeLiteMoE": _sigmoid_scores,
}
"""The same for blocks that choose experts themselves, in `route_tokens_to_experts`."""


class RouterTrace:
    """Routes of one forward: every Mixture-of-Experts layer reads the route to replay and records what it chose.

    Not a list or dict on purpose: FSDP2 copies those, and what is written into the copy is lost.
    """

    def __init__(self, routes_NLK: torch.Tensor | None = None) -> None:
        """Create the trace of one forward.

        Args:
            routes_NLK: integer routes to replay, by absolute decoder layer; where a token has any NATIVE in a layer,
                the router chooses. None only records.
        """
        self._routes_NLK = routes_NLK
        self._chosen: dict[int, torch.Tensor] = {}
        self._logits: dict[int, torch.Tensor] = {}

    @property
    def replays(self) -> bool:
        """True if there are routes to replay."""
        return self._routes_NLK is not None

    def check_layers(self, num_layers: int) -> None:
        """Check that routes to replay are numbered by absolute decoder layer.

        Raises:
            ValueError: not one route per decoder layer.
        """
        if self._routes_NLK is not None and self._routes_NLK.shape[1] != num_layers:
            raise ValueError(
                f"expected routes of all {num_layers} decoder layers (any numbers where a layer has no experts), "
                f"received {self._routes_NLK.shape[1]}"
            )

    def replayed(self, layer: int, native_NK: torch.Tensor) -> torch.Tensor:
        """The experts that a layer must use, int64 [N, K], given those that its router chose."""
        assert self._routes_NLK is not None
        forced_NK = self._routes_NLK[:, layer].to(native_NK)
        if forced_NK.shape != native_NK.shape:
            shapes = f"expected {tuple(native_NK.shape)}, received {tuple(forced_NK.shape)}"
            raise ValueError(f"routes of layer {layer} [tokens, experts per token]: {shapes}")
        return torch.where((forced_NK == NATIVE).any(dim=-1, keepdim=True), native_NK, forced_NK)

    def capture(
        self, layer: int, *, chosen_NK: torch.Tensor | None = None, logits_NE: torch.Tensor | None = None
    ) -> None:
        """Keep a layer's chosen experts, and its router's logits with their graph.

        Only the first call for a layer counts: gradient checkpointing runs the layer again in the backward.
        """
        if chosen_NK is not None:
            self._chosen.setdefault(layer, chosen_NK.detach().to(torch.int16))
        if logits_NE is not None:
            self._logits.setdefault(layer, logits_NE)

    def take_logits(self) -> list[torch.Tensor]:
        """Take the router logits [N, E] of all Mixture-of-Experts layers, in order, out of the trace."""
        logits = [self._logits[layer] for layer in sorted(self._logits)]
        # The keys stay, so that a recomputation does not capture again.
        self._logits = dict.fromkeys(self._logits, torch.empty(0))
        return logits

    def chosen(self) -> torch.Tensor:
        """Experts that ran, int16 [N, Mixture-of-Experts layers, K]."""
        return torch.stack([self._chosen[layer] for layer in sorted(self._chosen)], dim=1)


class RouterHooks:
    """Hooks that give the routers of a model the `router_trace` of its forward, if there is one."""

    def __init__(self, model: nn.Module) -> None:
        """Hook every Mixture-of-Experts layer.

        Args:
            model: a Hugging Face model, before FSDP or PEFT wrap it.

        Raises:
            UnsupportedModelError: no layer uses transformers' experts interface.
        """
        self.layers: tuple[int, ...] = ()
        """Absolute decoder layers with experts."""
        self.num_experts = 0
        """E, experts of a layer."""
        self.experts_per_token = 0
        """K of routers that can replay routes; 0 if none can."""
        self.unknown_router: str | None = None
        """Decoder layer class whose router is in neither table of scores: recording works, replay does not."""
        self._silent_router: str | None = None
        """Decoder layer class whose router's logits cannot be read, so that it has no auxiliary loss."""
        self._traces: dict[int, RouterTrace | None] = {}
        stack = language_model(model)
        decoder_layers = [(name, m) for name, m in stack.named_modules() if isinstance(m, GradientCheckpointingLayer)]
        self.num_layers = len(decoder_layers)
        """L, decoder layers with and without experts."""
        for name, decoder_layer in decoder_layers:
            experts = [m for m in decoder_layer.modules() if hasattr(m, "is_transposed") and hasattr(m, "has_gate")]
            if experts:
                self._hook(int(name.rsplit(".", 1)[-1]), decoder_layer, experts[0])
        if not self.layers:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no experts that go through transformers' experts interface; "
                "unset tree.router_aux_loss_coef and fsdp_config.router_replay.mode"
            )

    def check_auxiliary_loss(self, coef: float | None) -> None:
        """Check that `tree.router_aux_loss_coef` can add a loss; None and 0 do not.

        Raises:
            UnsupportedModelError: a router's logits cannot be read.
        """
        if coef and self._silent_router is not None:
            raise UnsupportedModelError(
                f"tree.router_aux_loss_coef={coef}: the router logits of {self._silent_router} cannot be read; set it "
                f"to 0, which counts the load alone. Routers that can: {', '.join(SCORES)}"
            )

    def _hook(self, layer: int, decoder_layer: nn.Module, experts: Any) -> None:
        self.layers += (layer,)
        self.num_experts = experts.num_experts
        decoder_layer.register_forward_pre_hook(partial(self._enter, layer), with_kwargs=True)
        # Recomputation stops early by an exception inside the layer; the hook must run then too.
        decoder_layer.register_forward_hook(partial(self._leave, layer), always_call=True)
        experts.register_forward_pre_hook(partial(self._record, layer))
        routers: list[Any] = [m for m in decoder_layer.modules() if type(m).__name__ in SCORES]
        blocks: list[Any] = [m for m in decoder_layer.modules() if type(m).__name__ in BLOCK_SCORES]
        if routers:
            self.experts_per_token = int(routers[0].top_k)
            routers[0].register_forward_hook(partial(self._route, layer))
            return
        self._silent_router = type(decoder_layer).__name__
        if blocks:
            self.experts_per_token = int(blocks[0].top_k)
            scores = BLOCK_SCORES[type(blocks[0]).__name__]
            # Set on the instance, so that the class and its other models do not change.
            vars(blocks[0])["route_tokens_to_experts"] = partial(self._route_in_block, layer, blocks[0], scores)
        else:
            self.unknown_router = type(decoder_layer).__name__

    def _enter(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the trace for the layer's hooks, in the forward and in its recomputation."""
        trace = kwargs.get(KEYWORD)
        if trace is not None and trace.replays:
            if self.unknown_router is not None:
                raise UnsupportedModelError(
                    f"routes cannot be replayed through {self.unknown_router}; routers that can: "
                    f"{', '.join((*SCORES, *BLOCK_SCORES))}"
                )
            trace.check_layers(self.num_layers)
        self._traces[layer] = trace

    def _leave(self, layer: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Drop the trace, which holds the graph."""
        self._traces[layer] = None

    def _route(self, layer: int, router: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        trace = self._traces[layer]
        if trace is None:
            return None
        logits_NE, _, native_NK = output
        trace.capture(layer, logits_NE=logits_NE)
        if not trace.replays:
            return None
        chosen_NK = trace.replayed(layer, native_NK)
        return logits_NE, SCORES[type(router).__name__](router, logits_NE, chosen_NK), chosen_NK

    def _route_in_block(
        self, layer: int, block: Any, scores: Scores, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts [N, K] of the tokens and the weights of their outputs."""
        native_NK, weights_NK = type(block).route_tokens_to_experts(block, logits)
        trace = self._traces[layer]
        if trace is None or not trace.replays:
            return native_NK, weights_NK
        chosen_NK = trace.replayed(layer, native_NK)
        return chosen_NK, scores(block, logits.flatten(0, -2), chosen_NK)

    def _record(self, layer: int, experts: nn.Module, args: tuple[Any, ...]) -> None:
        trace = self._traces[layer]
        if trace is not None:
            trace.capture(layer, chosen_NK=args[1])
