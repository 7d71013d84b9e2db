"""Ulysses sequence parallelism: a forest's tokens are sliced over ranks, and its heads inside attention.

Legend: S ranks, N tokens of the padded forest, n = N / S own tokens, H heads, h = H / S own heads, D head size.
Source: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed

KEYWORD = "sequence_parallel"
"""The keyword that carries it through a model's forward to its layers."""


class Exchanges:
    """Issues a group's collectives, and counts them: a rank that failed within a forward or backward can then catch up.

    It runs the rest of its ops over a single token, in collectives of the sizes that the other ranks expect.
    """

    def __init__(self) -> None:
        self.issued = 0
        self._to_pass_over = 0
        self._pretended: tuple[int, int] | None = None

    def start(self) -> None:
        """Start a call, or end one that was caught up."""
        self.issued = self._to_pass_over = 0
        self._pretended = None

    def restart(self) -> None:
        """Start the call again after a failure: what this rank has issued already is not issued again."""
        self._to_pass_over, self.issued = self.issued, 0

    def pretend(self, tokens: int, gathered: int) -> None:
        """From here on a forward or backward stands in for one whose exchanges are larger.

        Args:
            tokens: n, that this rank holds in it.
            gathered: values that each rank gives to a gather.
        """
        self._pretended = tokens, gathered

    def all_to_all(self, blocks_SnhD: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        """Send block i to rank i; block i of the result comes from rank i."""
        if self._pretended is not None:
            size, _, *rest = blocks_SnhD.shape
            if self._issues_next():
                sent = blocks_SnhD.new_zeros(size, self._pretended[0], *rest)
                torch.distributed.all_to_all_single(torch.empty_like(sent), sent, group=group)
            return torch.zeros_like(blocks_SnhD)
        received = torch.empty_like(blocks_SnhD)
        self._issues_next()
        torch.distributed.all_to_all_single(received, blocks_SnhD, group=group)
        return received

    def all_gather(self, x_n: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        """[S * n, ...], the tensors [n, ...] of all ranks."""
        size = torch.distributed.get_world_size(group)
        if self._pretended is not None:
            if self._issues_next():
                sent = x_n.new_zeros(self._pretended[1], *x_n.shape[1:])
                torch.distributed.all_gather([torch.empty_like(sent) for _ in range(size)], sent, group=group)
            return x_n.new_zeros(size * len(x_n), *x_n.shape[1:])
        gathered = x_n.new_empty((size * len(x_n), *x_n.shape[1:]))
        self._issues_next()
        torch.distributed.all_gather(list(gathered.chunk(size)), x_n, group=group)
        return gathered

    def _issues_next(self) -> bool:
        self.issued += 1
        return self.issued > self._to_pass_over


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
    """Rank of this process in the group."""
    exchanges: Exchanges = field(default_factory=Exchanges)
    """Issues their collectives."""

    @classmethod
    def of(
        cls, group: torch.distributed.ProcessGroup | None, exchanges: Exchanges | None = None
    ) -> "SequenceParallel | None":
        """The ranks of a process group; None where there is no group or only one rank in it.

        Args:
            group: the ranks.
            exchanges: counts their collectives; None: nobody counts.
        """
        if group is None or torch.distributed.get_world_size(group) == 1:
            return None
        size, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
        return cls(group, size, rank, Exchanges() if exchanges is None else exchanges)

    def own_tokens(self, tokens: int) -> int:
        """n, tokens that each rank holds of a forest of so many once it is padded."""
        return -(-tokens // self.size)

    def heads_of_tokens(self, x_nHD: torch.Tensor) -> torch.Tensor:
        """From own tokens with all heads, [n, H, ...], to all tokens with own heads, [N, h, ...].

        Raises:
            ValueError: H is no multiple of S.
        """
        self._check_heads(x_nHD.shape[1])
        return _Exchange.apply(x_nHD, self, _to_heads, _to_tokens)

    def tokens_of_heads(self, x_NhD: torch.Tensor) -> torch.Tensor:
        """The inverse: from all tokens with own heads, [N, h, ...], to own tokens with all heads, [n, H, ...].

        Raises:
            ValueError: N is no multiple of S.
        """
        self._check_tokens(len(x_NhD))
        return _Exchange.apply(x_NhD, self, _to_tokens, _to_heads)

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


_Way = Callable[[torch.Tensor, SequenceParallel], torch.Tensor]


def _to_heads(x_nHD: torch.Tensor, ranks: SequenceParallel) -> torch.Tensor:
    own, heads, *rest = x_nHD.shape
    blocks = x_nHD.unflatten(1, (ranks.size, heads // ranks.size)).movedim(1, 0)
    received = ranks.exchanges.all_to_all(blocks.contiguous(), ranks.group)
    return received.reshape(own * ranks.size, heads // ranks.size, *rest)


def _to_tokens(x_NhD: torch.Tensor, ranks: SequenceParallel) -> torch.Tensor:
    blocks = x_NhD.unflatten(0, (ranks.size, -1))
    received = ranks.exchanges.all_to_all(blocks.contiguous(), ranks.group)
    # Contiguous, as the layers' views of it expect.
    return received.movedim(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """`there`; the gradient takes the way `back`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: SequenceParallel, there: _Way, back: _Way) -> torch.Tensor:
        ctx.ranks, ctx.back = ranks, back
        return there(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.back(grad, ctx.ranks), None, None, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_n: torch.Tensor, ranks: SequenceParallel) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.exchanges.all_gather(x_n.contiguous(), ranks.group)

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.ranks.own_slice(grad_N) * ctx.ranks.size, None
