"""Ulysses sequence parallelism: ranks share a forest by tokens, and inside attention by heads.

Legend: S ranks, N tokens of the padded forest, n = N / S tokens of a rank, H heads, h = H / S heads of a rank, D head
size. "Own" tokens or heads are those of this rank.
Source: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed

KEYWORD = "sequence_parallel"
"""Keyword of a model's forward that carries the `SequenceParallel` to its layers."""


class IssuedCollectives:
    """Counts the collectives of a call, so that a rank that repeats it after a failure skips those already issued."""

    def __init__(self) -> None:
        self.issued = 0
        self._to_skip = 0

    def start(self) -> None:
        """Reset the counts before a call, or after one that was caught up."""
        self.issued = self._to_skip = 0

    def restart(self) -> None:
        """Repeat the call after a failure; collectives that this rank already issued are skipped."""
        self._to_skip, self.issued = self.issued, 0

    def issues_next(self) -> bool:
        """Count the next collective; False if this rank already issued it."""
        self.issued += 1
        return self.issued > self._to_skip


class Exchanges(IssuedCollectives):
    """Issues and counts a group's collectives, so that a rank that failed in a forward or backward can catch up.

    The failed rank repeats its ops over a single token, in collectives of the sizes that the other ranks expect.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pretended: tuple[int, int] | None = None

    def start(self) -> None:
        """Reset the counts before a call, or after one that was caught up; collectives have their own sizes again."""
        super().start()
        self._pretended = None

    def pretend(self, tokens: int, gathered: int) -> None:
        """Issue the collectives of a larger forward or backward from now on.

        Args:
            tokens: n of the larger one.
            gathered: values per rank in its gather.
        """
        self._pretended = tokens, gathered

    def all_to_all(self, blocks_SnhD: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        """Send block i to rank i; block i of the result comes from rank i."""
        if self._pretended is not None:
            size, _, *rest = blocks_SnhD.shape
            if self.issues_next():
                sent = blocks_SnhD.new_zeros(size, self._pretended[0], *rest)
                torch.distributed.all_to_all_single(torch.empty_like(sent), sent, group=group)
            return torch.zeros_like(blocks_SnhD)
        received = torch.empty_like(blocks_SnhD)
        self.issues_next()
        torch.distributed.all_to_all_single(received, blocks_SnhD, group=group)
        return received

    def all_gather(self, x_n: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        """Concatenate the tensors [n, ...] of all ranks to [S * n, ...]."""
        size = torch.distributed.get_world_size(group)
        if self._pretended is not None:
            if self.issues_next():
                sent = x_n.new_zeros(self._pretended[1], *x_n.shape[1:])
                torch.distributed.all_gather([torch.empty_like(sent) for _ in range(size)], sent, group=group)
            return x_n.new_zeros(size * len(x_n), *x_n.shape[1:])
        gathered = x_n.new_empty((size * len(x_n), *x_n.shape[1:]))
        self.issues_next()
        torch.distributed.all_gather(list(gathered.chunk(size)), x_n, group=group)
        return gathered


@dataclass(frozen=True, slots=True, eq=False)
class SequenceParallel:
    """The ranks that share one forest: by tokens outside attention, by heads inside it.

    Every rank of a group computes the same loss from gathered outputs, and gradients are averaged over all ranks,
    including those of the group. `gather_tokens` therefore multiplies gradients by S, as verl does.
    """

    group: torch.distributed.ProcessGroup
    """Process group of the ranks, in the order of their slices."""
    size: int
    """S, at least 2."""
    rank: int
    """Rank of this process in the group."""
    exchanges: Exchanges = field(default_factory=Exchanges)
    """Issues the group's collectives."""

    def own_tokens(self, tokens: int) -> int:
        """n, tokens per rank of a forest with this many tokens, padding included."""
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
        """From own tokens [n, ...] to all tokens [N, ...]; n is the same on every rank.

        The backward returns the own slice times S, so that the mean over ranks is the gradient of the loss.
        """
        return _GatherTokens.apply(x_n, self)

    def own_slice(self, x_N: torch.Tensor) -> torch.Tensor:
        """Own tokens [n, ...] of [N, ...]; for inputs and plans without a graph.

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
        """This rank's slice of a length that is a multiple of S."""
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
    # With one head a rank `flatten` is a view; layers that call `view` expect a contiguous tensor.
    return received.movedim(0, 1).flatten(1, 2).contiguous()


class _Exchange(torch.autograd.Function):
    """`there` in the forward, `back` for the gradient."""

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
