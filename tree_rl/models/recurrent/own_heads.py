"""Recurrent layers under sequence parallelism: outside, a rank has a slice of the tokens; inside, a slice of the heads.

The channels of a convolution are blocks of heads, such as the queries, keys and values of a Gated DeltaNet. Every rank
gets the same number of heads of each block. If a block has too few heads (keys, B, C), heads are sent to several ranks,
as attention does for keys and values.
Legend: N unique tokens, n tokens of a slice, C channels, c channels of a rank, H heads, D head size, S ranks.
"""

import math
from typing import NamedTuple

import torch

from tree_rl.models.sequence_parallel import SequenceParallel


class Heads(NamedTuple):
    """A block of channels that consists of heads."""

    number: int
    """H, number of heads."""
    size: int
    """D, channels per head."""

    def copies(self, ranks: SequenceParallel) -> int:
        """Number of ranks that get each head, so that all ranks get equally many heads."""
        return math.lcm(self.number, ranks.size) // self.number

    def own(self, ranks: SequenceParallel | None) -> "Heads":
        """A rank's share of the block."""
        return self if ranks is None else Heads(self.number * self.copies(ranks) // ranks.size, self.size)


def channels_of_tokens(
    mixed_nC: torch.Tensor, blocks: tuple[Heads, ...], ranks: SequenceParallel | None
) -> torch.Tensor:
    """From all channels [n, C] of this rank's tokens to its channels [N, c] of all tokens, in one exchange."""
    if ranks is None:
        return mixed_nC
    sent = []
    for block, part_nC in zip(blocks, _split(mixed_nC, blocks, -1), strict=True):
        heads_nHD = _repeated(part_nC.unflatten(-1, block), block.copies(ranks), dim=1)
        sent.append(heads_nHD.reshape(len(mixed_nC), ranks.size, -1))
    return ranks.heads_of_tokens(torch.cat(sent, dim=-1)).squeeze(1)


def heads_of_channels(
    mixed_NC: torch.Tensor, blocks: tuple[Heads, ...], ranks: SequenceParallel | None
) -> tuple[torch.Tensor, ...]:
    """Split a rank's channels [N, c] into heads [N, H, D] per block."""
    own = tuple(block.own(ranks) for block in blocks)
    return tuple(part.unflatten(-1, block) for block, part in zip(own, _split(mixed_NC, own, -1), strict=True))


def own_channels(parameter_C: torch.Tensor, blocks: tuple[Heads, ...], ranks: SequenceParallel | None) -> torch.Tensor:
    """The part [c, ...] of a parameter [C, ...] for this rank's channels."""
    if ranks is None:
        return parameter_C
    own = []
    for block, part_C in zip(blocks, _split(parameter_C, blocks, 0), strict=True):
        own.append(ranks.own_heads(_repeated(part_C.unflatten(0, block), block.copies(ranks), dim=0)).flatten(0, 1))
    return torch.cat(own)


def own_heads(parameter_H: torch.Tensor, ranks: SequenceParallel | None) -> torch.Tensor:
    """The part [H / S, ...] of a parameter [H, ...] for this rank's heads."""
    return parameter_H if ranks is None else ranks.own_heads(parameter_H)


def heads_of_tokens(x_nHD: torch.Tensor, ranks: SequenceParallel | None) -> torch.Tensor:
    """From all heads of this rank's tokens to this rank's heads of all tokens, [N, H / S, D]."""
    return x_nHD if ranks is None else ranks.heads_of_tokens(x_nHD)


def tokens_of_heads(x_NHD: torch.Tensor, ranks: SequenceParallel | None) -> torch.Tensor:
    """The inverse of `heads_of_tokens`, [n, H, D]."""
    return x_NHD if ranks is None else ranks.tokens_of_heads(x_NHD)


def _repeated(t: torch.Tensor, times: int, *, dim: int) -> torch.Tensor:
    return t if times == 1 else t.repeat_interleave(times, dim=dim)


def _split(t: torch.Tensor, blocks: tuple[Heads, ...], dim: int) -> tuple[torch.Tensor, ...]:
    return t.split([block.number * block.size for block in blocks], dim=dim)
