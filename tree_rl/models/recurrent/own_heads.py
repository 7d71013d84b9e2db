"""Recurrent layers under sequence parallelism: slices of tokens outside, all tokens of a rank's own heads inside.

Channels of a convolution come in blocks of heads, such as the queries, keys and values of a Gated DeltaNet. A rank gets
as many of each block; heads that several others read (keys, B, C) are sent more than once where ranks cannot share them
out, as attention sends keys and values.
Legend: N unique tokens, n of a slice, C channels, c a rank's own, H heads, D head size.
"""

import math
from typing import NamedTuple

import torch

from tree_rl.models.sequence_parallel import SequenceParallel


class Heads(NamedTuple):
    """A block of channels."""

    number: int
    """H."""
    size: int
    """D, channels of a head."""

    def copies(self, ranks: SequenceParallel) -> int:
        """How often each head is sent, so that all ranks get equally many."""
        return math.lcm(self.number, ranks.size) // self.number

    def own(self, ranks: SequenceParallel | None) -> "Heads":
        """A rank's share of the block, repeated heads counted."""
        return self if ranks is None else Heads(self.number * self.copies(ranks) // ranks.size, self.size)


def channels_of_tokens(
    mixed_nC: torch.Tensor, blocks: tuple[Heads, ...], ranks: SequenceParallel | None
) -> torch.Tensor:
    """All tokens' own channels [N, c], block after block, in one exchange; the input itself without ranks."""
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
    """A rank's own heads [N, H, D] of each block of its own channels."""
    own = tuple(block.own(ranks) for block in blocks)
    return tuple(part.unflatten(-1, block) for block, part in zip(own, _split(mixed_NC, own, -1), strict=True))


def own_channels(parameter_C: torch.Tensor, blocks: tuple[Heads, ...], ranks: SequenceParallel | None) -> torch.Tensor:
    """The part [c, ...] of a parameter [C, ...] that belongs to a rank's own channels."""
    if ranks is None:
        return parameter_C
    own = []
    for block, part_C in zip(blocks, _split(parameter_C, blocks, 0), strict=True):
        own.append(ranks.own_heads(_repeated(part_C.unflatten(0, block), block.copies(ranks), dim=0)).flatten(0, 1))
    return torch.cat(own)


def own_heads(parameter_H: torch.Tensor, ranks: SequenceParallel | None) -> torch.Tensor:
    """A rank's part of a parameter with one entry per head."""
    return parameter_H if ranks is None else ranks.own_heads(parameter_H)


def heads_of_tokens(x_nHD: torch.Tensor, ranks: SequenceParallel | None) -> torch.Tensor:
    """All tokens' own heads, [N, H / S, D]."""
    return x_nHD if ranks is None else ranks.heads_of_tokens(x_nHD)


def tokens_of_heads(x_NHD: torch.Tensor, ranks: SequenceParallel | None) -> torch.Tensor:
    """Own tokens' heads, [n, H, D]: the way back."""
    return x_NHD if ranks is None else ranks.tokens_of_heads(x_NHD)


def _repeated(t: torch.Tensor, times: int, *, dim: int) -> torch.Tensor:
    return t if times == 1 else t.repeat_interleave(times, dim=dim)


def _split(t: torch.Tensor, blocks: tuple[Heads, ...], dim: int) -> tuple[torch.Tensor, ...]:
    return t.split([block.number * block.size for block in blocks], dim=dim)
