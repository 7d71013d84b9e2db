"""Model inputs for one forest, or one partition of it, on the device.

Legend: N unique tokens, P past tokens, n tokens of this rank: N without sequence parallelism;
A rotary axes.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tree_kernels.host_copy import to_device_together
from tree_kernels.tree_layout import TreeLayout
from tree_rl.models import sequence_parallel, tiled_mlp
from tree_rl.models.attention import skip_mask
from tree_rl.models.images import TOKENS, ImageTokens, TokensWithImages
from tree_rl.models.relay import LayerRelay
from tree_rl.models.routers.trace import KEYWORD as ROUTER_TRACE
from tree_rl.models.routers.trace import RouterTrace
from tree_rl.models.sequence_parallel import SequenceParallel
from tree_rl.tree.attention_blocks import count_attention_blocks
from tree_rl.tree.forest import Forest
from tree_rl.tree.partition import Partition


class ModelInputs(Protocol):
    """Tokens on the device and the keywords with which a model reads them."""

    def model_kwargs(self) -> dict[str, object]:
        """Keyword arguments of the model's forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeInputs:
    """A forest or a partition on the device."""

    input_ids_1n: torch.Tensor
    """int64 [1, n], token ids in DFS order."""
    position_ids_1n: torch.Tensor
    """int64 [1, n], depth on the path: siblings share positions. With images int64 [A, 1, n], rotary positions."""
    layout: TreeLayout
    """Attention mask of all N tokens; with sequence parallelism padded to a multiple of S by tokens that none sees."""
    router_trace: RouterTrace | None = None
    """Routes to record or replay; needs `RouterHooks`."""
    relay: LayerRelay | None = None
    """Relay of a partition; None for a whole forest."""
    tile_tokens: int | None = None
    """Tokens per tile of each dense layer's MLP; None runs it over all tokens at once."""
    ranks: SequenceParallel | None = None
    """Ranks that share the tokens; None if this rank has all of them."""
    images: ImageTokens | None = None
    """The image tokens; None for rows of text."""

    @classmethod
    def from_forest(
        cls,
        forest: Forest,
        device: torch.device | str = "cpu",
        *,
        partition: Partition | None = None,
        router_trace: RouterTrace | None = None,
        relay: LayerRelay | None = None,
        tile_tokens: int | None = None,
        ranks: SequenceParallel | None = None,
        images: TokensWithImages | None = None,
    ) -> "TreeInputs":
        """Move a forest, or a partition of it, to `device` with one asynchronous copy.

        `images` are features and rotary positions of the forest's tokens, None for rows of text; the other arguments
        are the fields.
        """
        input_ids, position, end, past_length = forest.input_ids, forest.position, forest.subtree_end, 0
        if partition is not None:
            input_ids, position, end = input_ids[partition.tokens], partition.position, partition.local_subtree_end
            past_length = partition.past_length
            images = None if images is None else images.take(partition.tokens)
        own = slice(None)
        if ranks is not None:
            input_ids, position, end = _padded(input_ids, position, end, past_length, ranks.size)
            own = ranks.own_range(len(end))
        arrays: list[np.ndarray] = [
            input_ids[own].astype(np.int64),
            position[own].astype(np.int64),
            (position - past_length).astype(np.int32),
            end,
        ]
        ids, positions, local, end_on_device = to_device_together(arrays, device)
        rotary, image_tokens = positions.unsqueeze(0), None
        if images is not None:
            rotary, image_tokens = images.own(*own.indices(len(end))[:2]).on_device(device)
        # Counted on the host, because counting on the device would synchronise with it.
        share = count_attention_blocks(end, past_length=past_length).partial_share
        return cls(
            input_ids_1n=ids.unsqueeze(0),
            position_ids_1n=rotary,
            layout=TreeLayout(end_on_device, local, past_length, share, end),
            router_trace=router_trace,
            relay=relay,
            tile_tokens=tile_tokens,
            ranks=ranks,
            images=image_tokens,
        )

    def of_all(self, values_n: torch.Tensor) -> torch.Tensor:
        """Values of all tokens, padding included, gathered from this rank's values [n]."""
        return values_n if self.ranks is None else self.ranks.gather_tokens(values_n)

    def model_kwargs(self) -> dict[str, object]:
        """Keyword arguments of a Hugging Face model prepared by `use_tree_attention`."""
        of_some_forwards = {
            ROUTER_TRACE: self.router_trace,
            "kv_relay": self.relay,
            tiled_mlp.KEYWORD: self.tile_tokens,
            sequence_parallel.KEYWORD: self.ranks,
            TOKENS: self.images,
        }
        return {
            "input_ids": self.input_ids_1n,
            "position_ids": self.position_ids_1n,
            "attention_mask": skip_mask(self.input_ids_1n.device),
            "tree_layout": self.layout,
            "use_cache": False,
            **{name: value for name, value in of_some_forwards.items() if value is not None},
        }


def _padded(
    input_ids: np.ndarray, position: np.ndarray, end: np.ndarray, past_length: int, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, positions and subtree ends, padded to a multiple of `size` by one-token trees.

    They repeat a token of the rows: at a zero embedding, such as that of the padding token, gradients of Gemma 3n are
    not finite.
    """
    tokens = len(end)
    pads = np.arange(tokens, tokens + -tokens % size)
    return (
        np.append(input_ids, np.full_like(pads, input_ids[0])),
        np.append(position, np.full_like(pads, past_length)),
        np.append(end, pads + 1).astype(np.int32),
    )
