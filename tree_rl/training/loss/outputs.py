"""What a loss may read: one value per position, for the next token of the row (or, for a critic, the token itself).

Legend: F flat tokens, E edges, T whatever a record ranges over.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

import torch

LOG_PROBS, ENTROPY, SUM_PI_SQUARED, VALUES = "log_probs", "entropy", "sum_pi_squared", "values"

Wanted = tuple[str, ...]
"""Names of the outputs that a call asks for: `values` alone for a critic, else `log_probs` and any of the others."""


def beside_log_probs(names: Wanted) -> Wanted:
    """What a head computes of edges on top of log-probs."""
    return tuple(name for name in names if name != LOG_PROBS)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EdgeOutputs:
    """Outputs by name, all of one length; None where a call did not ask. A new output is one more field here."""

    log_probs: torch.Tensor | None = None
    """[T], log-prob of the next token; 0 where no edge was asked for."""
    entropy: torch.Tensor | None = None
    """[T], entropy of the distribution of the next token."""
    sum_pi_squared: torch.Tensor | None = None
    """[T], sum of squared probabilities of that distribution."""
    values: torch.Tensor | None = None
    """[T], a critic's value of the token itself."""

    def __getitem__(self, name: str) -> torch.Tensor:
        """One output.

        Raises:
            KeyError: the call did not ask for it.
        """
        return self.present()[name]

    def present(self) -> dict[str, torch.Tensor]:
        """The outputs that were asked for, by name."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in named if value is not None}

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "EdgeOutputs":
        """The same outputs, each changed."""
        return EdgeOutputs(**{name: change(value) for name, value in self.present().items()})

    def detach(self) -> "EdgeOutputs":
        """The same values without graph."""
        return self.map(torch.Tensor.detach)

    def select(self, positions_P: torch.Tensor) -> "EdgeOutputs":
        """The outputs at int64 positions [P]."""
        return self.map(lambda value: value[positions_P.to(value.device)])

    @classmethod
    def of_edges(cls, per_edge: Iterable[torch.Tensor | None]) -> "EdgeOutputs":
        """What a head computed of edges, in the order of `tree_kernels`' `EdgeValues`."""
        return cls(**dict(zip((LOG_PROBS, ENTROPY, SUM_PI_SQUARED), per_edge, strict=True)))

    @classmethod
    def zeros(cls, names: Wanted, size: int, device: torch.device) -> "EdgeOutputs":
        """Float32 zeros [size] under the given names."""
        return cls.of({name: torch.zeros(size, device=device) for name in names})

    @classmethod
    def of(cls, named: Mapping[str, torch.Tensor]) -> "EdgeOutputs":
        """Outputs from a mapping.

        Raises:
            ValueError: a name that no output has.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(named) - set(known))
        if unknown:
            raise ValueError(f"outputs: expected names among {', '.join(known)}, received {unknown[0]!r}")
        return cls(**named)
