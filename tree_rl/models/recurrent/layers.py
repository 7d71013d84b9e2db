"""Layers of Hugging Face models that carry a state along the sequence, and which of them read trees.

A mixer reads a tree by having some of its attributes replaced while its decoder layer runs with `tree_layout=`, in the
forward and in a recomputation of it; other calls run transformers' own code.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import nn

from tree_rl.models import sequence_parallel
from tree_rl.models.own_forwards import own_forward


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentKind:
    """One kind of recurrent layer that can read trees."""

    layer_type: str
    """as in a config's `layer_types`"""
    attribute: str
    """where a decoder layer holds its mixer"""
    mixers: frozenset[str]
    """classes of transformers"""
    own: tuple[str, ...] = ()
    """functions that a mixer must hold itself and call as such, so that they can be replaced (transformers 5.17 holds
    them, but calls others)"""


GATED_DELTA_NET = RecurrentKind(
    layer_type="linear_attention",
    attribute="linear_attn",
    mixers=frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"}),
    own=("causal_conv1d_fn", "chunk_gated_delta_rule"),
)
SHORT_CONVOLUTION = RecurrentKind(
    layer_type="conv", attribute="conv", mixers=frozenset({"Lfm2ShortConv", "Lfm2MoeShortConv"})
)
MAMBA_2 = RecurrentKind(
    layer_type="mamba", attribute="mamba", mixers=frozenset({"BambaMixer", "GraniteMoeHybridMambaLayer"})
)
KINDS = (GATED_DELTA_NET, SHORT_CONVOLUTION, MAMBA_2)


def kind_of(mixer: object) -> RecurrentKind | None:
    """The kind of a mixer that can read trees, else None."""
    for kind in KINDS:
        if type(mixer).__name__ in kind.mixers and all(_calls_its_own(mixer, name) for name in kind.own):
            return kind
    return None


def _calls_its_own(mixer: Any, name: str) -> bool:
    return name in vars(mixer) and f"self.{name}" in _source(own_forward(type(mixer)))


@cache
def _source(forward: Callable[..., Any]) -> str:
    """Read once for all layers of a model."""
    return inspect.getsource(inspect.unwrap(forward))


def layers_of(model: nn.Module, kind: RecurrentKind) -> list[nn.Module]:
    """Decoder layers whose mixer is of a kind."""
    return [layer for layer in model.modules() if kind_of(getattr(layer, kind.attribute, None)) is kind]


def readable_layer_types(model: nn.Module) -> frozenset[str]:
    """Layer types of recurrent layers in a model that read trees."""
    return frozenset(kind.layer_type for kind in KINDS if layers_of(model, kind))


def replace_during_trees(
    model: nn.Module, kind: RecurrentKind, replacements: Callable[..., dict[str, Any]], *, keyword: str = "tree_layout"
) -> None:
    """Let every mixer of a kind read trees; a model without such layers is left alone.

    Args:
        model: whose decoder layers receive the layout, `kv_relay` and `sequence_parallel` as keywords.
        kind: of the mixers.
        replacements: from a mixer, the layout of a call, the relay of its partition (or None) and the ranks that share
            its tokens (or None) to the attributes that stand in for the mixer's.
        keyword: under which a layer receives the layout; calls without it are left alone.
    """
    for layer in layers_of(model, kind):
        mixer = getattr(layer, kind.attribute)
        hooks = ReplacedDuringCalls(mixer, partial(replacements, mixer), keyword)
        layer.register_forward_pre_hook(hooks.enter, with_kwargs=True)
        layer.register_forward_hook(hooks.leave, always_call=True)


def replace_forward_during_trees(model: nn.Module, kind: RecurrentKind, forward: Callable[..., Any]) -> None:
    """Let every mixer of a kind read trees by another forward; a model without such layers is left alone.

    Args:
        model: whose decoder layers receive the layout, `kv_relay` and `sequence_parallel` as keywords.
        kind: of the mixers.
        forward: of a mixer, the layout of a call, the relay of its partition (or None), the ranks that share its tokens
            (or None) and the mixer's own arguments.
    """
    replace_during_trees(model, kind, partial(_forward_of, forward))


def _forward_of(forward: Callable[..., Any], mixer: Any, *call: Any) -> dict[str, Any]:
    return {"forward": partial(forward, mixer, *call)}


class ReplacedDuringCalls:
    """Replaces attributes of a layer's part for the duration of the layer's forward, recomputations included."""

    def __init__(self, part: Any, replacements: Callable[..., dict[str, Any]], keyword: str) -> None:
        """Bind a part.

        Args:
            part: inside a decoder layer, whose forward calls `enter` and `leave`.
            replacements: from the keyword's value, the relay (or None) and the ranks that share the tokens (or None) to
                the attributes that stand in.
            keyword: calls of the layer without it are left alone.
        """
        self._part = part
        self._replacements = replacements
        self._keyword = keyword
        self._stock: dict[str, Any] = {}

    def enter(self, layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        """Replace attributes where the layer is called with a tree."""
        layout = kwargs.get(self._keyword)
        if layout is None:
            return
        own = vars(self._part)
        call = layout, kwargs.get("kv_relay"), kwargs.get(sequence_parallel.KEYWORD)
        for name, function in self._replacements(*call).items():
            self._stock[name] = own.get(name, _OF_THE_CLASS)
            setattr(self._part, name, function)

    def leave(self, layer: nn.Module, args: tuple[object, ...], output: object) -> None:
        """Put transformers' own back."""
        for name, stock in self._stock.items():
            if stock is _OF_THE_CLASS:
                delattr(self._part, name)
            else:
                setattr(self._part, name, stock)
        self._stock = {}


_OF_THE_CLASS = object()
