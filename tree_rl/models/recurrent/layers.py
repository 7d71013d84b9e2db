"""Finds recurrent layers of Hugging Face models and replaces parts of them during forwards over trees.

While a decoder layer runs with `tree_layout=`, in the forward or its recomputation, some attributes of its mixer are
replaced. Other calls run transformers' own code.
"""

import inspect
from collections.abc import Callable, Sequence
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
    """Name in a config's `layer_types`."""
    mixers: frozenset[str]
    """Names of transformers' mixer classes."""
    own: tuple[str, ...] = ()
    """Functions that a mixer must have as instance attributes and call through `self`, so that they can be replaced
    (transformers 5.17 has them, but calls others)."""


GATED_DELTA_NET = RecurrentKind(
    layer_type="linear_attention",
    mixers=frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"}),
    own=("causal_conv1d_fn", "chunk_gated_delta_rule"),
)
SHORT_CONVOLUTION = RecurrentKind(layer_type="conv", mixers=frozenset({"Lfm2ShortConv", "Lfm2MoeShortConv"}))
MAMBA_2 = RecurrentKind(
    layer_type="mamba",
    mixers=frozenset(
        {"BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer", "FalconH1Mixer", "Zamba2MambaMixer"}
    ),
)
KINDS = (GATED_DELTA_NET, SHORT_CONVOLUTION, MAMBA_2)


def kind_of(mixer: object) -> RecurrentKind | None:
    """The kind of a mixer that can read trees, or None."""
    for kind in KINDS:
        if type(mixer).__name__ in kind.mixers and all(_calls_its_own(mixer, name) for name in kind.own):
            return kind
    return None


def _calls_its_own(mixer: Any, name: str) -> bool:
    return name in vars(mixer) and f"self.{name}" in _source(own_forward(type(mixer)))


@cache
def _source(forward: Callable[..., Any]) -> str:
    return inspect.getsource(inspect.unwrap(forward))


def readable_layer_types(model: nn.Module) -> frozenset[str]:
    """Types of the model's recurrent layers that can read trees."""
    kinds = {kind_of(module) for module in model.modules()} - {None}
    return frozenset(kind.layer_type for kind in KINDS if kind in kinds)


def replace_during_trees(
    model: nn.Module, kind: RecurrentKind, replacements: Callable[..., dict[str, Any]], *, keyword: str = "tree_layout"
) -> None:
    """Replace attributes of every mixer of this kind during forwards over trees.

    Args:
        model: its decoder layers receive the layout, `kv_relay` and `sequence_parallel` as keywords.
        kind: kind of the mixers.
        replacements: called with a mixer, the layout, the partition's relay (or None) and the ranks that share the
            tokens (or None); returns the attributes to replace.
        keyword: keyword that carries the layout; calls without it do not change.
    """
    pairs = [(layer, mixer) for layer in model.modules() for mixer in layer.children() if kind_of(mixer) is kind]
    for layer, mixer in pairs:
        ReplacedDuringCalls(layer, [mixer], replacements, keyword)


def replace_forward_during_trees(model: nn.Module, kind: RecurrentKind, forward: Callable[..., Any]) -> None:
    """Replace the forward of every mixer of this kind during forwards over trees.

    `forward` gets the mixer, the layout, the partition's relay (or None), the ranks that share the tokens (or None)
    and the arguments of the mixer's own forward.
    """
    replace_during_trees(model, kind, partial(_forward_of, forward))


def _forward_of(forward: Callable[..., Any], mixer: Any, *call: Any) -> dict[str, Any]:
    return {"forward": partial(forward, mixer, *call)}


class ReplacedDuringCalls:
    """Forward hooks of a decoder layer that replace attributes of some of its modules, also during recomputation."""

    def __init__(
        self, layer: nn.Module, parts: Sequence[nn.Module], replacements: Callable[..., dict[str, Any]], keyword: str
    ) -> None:
        """Register the hooks.

        Args:
            layer: a decoder layer.
            parts: modules inside it.
            replacements: called with a part, the keyword's value, the relay (or None) and the ranks that share the
                tokens (or None); returns the attributes to replace.
            keyword: keyword of the layer's forward; calls without it do not change.
        """
        self._parts, self._replacements, self._keyword = parts, replacements, keyword
        self._stock: list[tuple[nn.Module, str, Any]] = []
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        layer.register_forward_hook(self._leave, always_call=True)

    def _enter(self, layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        """Replace the attributes if the keyword is given."""
        given = kwargs.get(self._keyword)
        if given is None:
            return
        for part in self._parts:
            own = vars(part)
            call = given, kwargs.get("kv_relay"), kwargs.get(sequence_parallel.KEYWORD)
            for name, function in self._replacements(part, *call).items():
                self._stock.append((part, name, own.get(name, _OF_THE_CLASS)))
                setattr(part, name, function)

    def _leave(self, layer: nn.Module, args: tuple[object, ...], output: object) -> None:
        """Restore the attributes."""
        for part, name, stock in self._stock:
            if stock is _OF_THE_CLASS:
                delattr(part, name)
            else:
                setattr(part, name, stock)
        self._stock = []


_OF_THE_CLASS = object()
