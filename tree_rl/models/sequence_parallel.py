"""Ulysses sequence parallelism: a forest's tokens are sliced over ranks, and its heads inside attention.

Legend: S ranks, N tokens of the padded forest, n = N / S own tokens, H heads, h = H / S own heads, D head size.
Source: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

KEYWORD = "sequence_parallel"
"""The keyword that carries it through a model's forward to its layers."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceParallel:
    """The ranks that share one forest's tokens: slices of tokens outside attention, slices of heads inside it.

    Every rank computes the same loss from gathered outputs, and gradients are averaged over all ranks, those of a group
    included. `gather_tokens` therefore multiplies gradients by S, once, as verl does.
    """

    group: torch.distributed.ProcessGroup
    """The ranks, in the order of their slices."""
    size: int
    """S, at least 2."""
    rank: int
    """Of this process in the group."""

    @classmethod
    def of(cls, group: torch.distributed.ProcessGroup | None) -> "SequenceParallel | None":
        """The ranks of a process group; None where there is no group or only one rank in it."""
        if group is None or torch.distributed.get_world_size(group) == 1:
            return None
        return cls(group, torch.distributed.get_world_size(group), torch.distributed.get_rank(group))

    def own_tokens(self, tokens: int) -> int:
        """n, tokens that each rank holds of a forest of so many once it is padded."""
        return -(-tokens // self.size)

    def heads_of_tokens(self, x_nHD: torch.Tensor) -> torch.Tensor:
        """From own tokens with all heads, [n, H, ...], to all tokens with own heads, [N, h, ...].

        Raises:
            ValueError: H is no multiple of S.
        """
        self._check_heads(x_nHD.shape[1])
        return _HeadsOfTokens.apply(x_nHD, self)

    def tokens_of_heads(self, x_NhD: torch.Tensor) -> torch.Tensor:
        """The inverse: from all tokens with own heads, [N, h, ...], to own tokens with all heads, [n, H, ...].

        Raises:
            ValueError: N is no multiple of S.
        """
        self._check_tokens(len(x_NhD))
        return _TokensOfHeads.apply(x_NhD, self)

    def gather_tokens(self, x_n: torch.Tensor) -> torch.Tensor:
        """From own tokens [n, ...] to all tokens [N, ...]; every rank gives as many.

        The backward takes the own slice times S, so a mean over ranks is the gradient of the one loss.
        """
        return _GatherTokens.apply(x_n, self)

    def own_slice(self, x_N: torch.Tensor) -> torch.Tensor:
        """Own tokens [n, ...] of [N, ...]: for inputs and plans, which have no graph.

        Raises:
            ValueError: N is no multiple of S.
        """
        self._check_tokens(len(x_N))
        return x_N[self.own_range(len(x_N))]

    def own_heads(self, x_H: torch.Tensor) -> torch.Tensor:
        """Own heads [h, ...] of a parameter [H, ...]: the heads that `heads_of_tokens` leaves on this rank.

        Raises:
            ValueError: H is no multiple of S.
        """
        self._check_heads(len(x_H))
        return x_H[self.own_range(len(x_H))]

    def own_range(self, length: int) -> slice:
        """This rank's share of so many, a multiple of S."""
        own = length // self.size
        return slice(self.rank * own, (self.rank + 1) * own)

    def _check_heads(self, heads: int) -> None:
        if heads % self.size:
            raise ValueError(
                f"{heads} heads cannot be divided among {self.size} ranks; set ulysses_sequence_parallel_size to a "
                f"divisor of {heads}"
            )

    def _check_tokens(self, tokens: int) -> None:
        if tokens % self.size:
            raise ValueError(f"expected tokens padded to a multiple of {self.size} ranks, received {tokens}")


def _exchange(blocks: torch.Tensor, ranks: SequenceParallel) -> torch.Tensor:
    """Send block i of [S, ...] to rank i; block i of the result comes from rank i."""
    blocks = blocks.contiguous()
    received = torch.empty_like(blocks)
    torch.distributed.all_to_all_single(received, blocks, group=ranks.group)
    return received


def _to_heads(x_nHD: torch.Tensor, ranks: SequenceParallel) -> torch.Tensor:
    own, heads, *rest = x_nHD.shape
    received = _exchange(x_nHD.unflatten(1, (ranks.size, heads // ranks.size)).movedim(1, 0), ranks)
    return received.reshape(own * ranks.size, heads // ranks.size, *rest)


def _to_tokens(x_NhD: torch.Tensor, ranks: SequenceParallel) -> torch.Tensor:
    received = _exchange(x_NhD.unflatten(0, (ranks.size, -1)), ranks)
    # Contiguous, as the layers' views of it expect.
    return received.movedim(0, 1).flatten(1, 2)


class _HeadsOfTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_nHD: torch.Tensor, ranks: SequenceParallel) -> torch.Tensor:
        ctx.ranks = ranks
        return _to_heads(x_nHD, ranks)

    @staticmethod
    def backward(ctx: Any, grad_NhD: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_tokens(grad_NhD, ctx.ranks), None


class _TokensOfHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NhD: torch.Tensor, ranks: SequenceParallel) -> torch.Tensor:
        ctx.ranks = ranks
        return _to_tokens(x_NhD, ranks)

    @staticmethod
    def backward(ctx: Any, grad_nHD: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_heads(grad_nHD, ctx.ranks), None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_n: torch.Tensor, ranks: SequenceParallel) -> torch.Tensor:
        ctx.ranks = ranks
        x_n = x_n.contiguous()
        gathered = x_n.new_empty((ranks.size * len(x_n), *x_n.shape[1:]))
        torch.distributed.all_gather(list(gathered.chunk(ranks.size)), x_n, group=ranks.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.ranks.own_slice(grad_N) * ctx.ranks.size, None
