"""What a loss may read: one value per position, for the next token of the row (or, for a critic, the token itself)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

import torch

LOG_PROBS, ENTROPY, SUM_PI_SQUARED, VALUES = "log_probs", "entropy", "sum_pi_squared", "values"
CANDIDATE_LOG_PROBS = "candidate_log_probs"

Wanted = tuple[str, ...]
"""Names of the outputs that a call asks for: `values` alone for a critic, else `log_probs` and any of the others."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EdgeOutputs:
    """Outputs by name, all of length T; None (a KeyError from `outputs[name]`) if the call did not ask."""

    log_probs: torch.Tensor | None = None
    """[T], log-prob of the next token; 0 where it was not asked for."""
    entropy: torch.Tensor | None = None
    """[T], entropy of the next token's distribution."""
    sum_pi_squared: torch.Tensor | None = None
    """[T], sum of squared probabilities of that distribution, without gradient."""
    values: torch.Tensor | None = None
    """[T], a critic's value of the token itself."""
    candidate_log_probs: torch.Tensor | None = None
    """[T, K], log-probs of the candidates for the next token; None if the rows name none (`Rows.candidates_FK`)."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.present()[name]

    def present(self) -> dict[str, torch.Tensor]:
        """The outputs that were asked for, by name."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in named if value is not None}

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "EdgeOutputs":
        """Apply a function to each output."""
        return EdgeOutputs(**{name: change(value) for name, value in self.present().items()})

    def detach(self) -> "EdgeOutputs":
        """The outputs without graph."""
        return self.map(torch.Tensor.detach)

    def select(self, positions_P: torch.Tensor) -> "EdgeOutputs":
        """The outputs at int64 positions [P]."""
        return self.map(lambda value: value[positions_P.to(value.device)])

    @classmethod
    def of_edges(cls, per_edge: Iterable[torch.Tensor | None]) -> "EdgeOutputs":
        """Outputs from a head's values of edges, in the order of `EdgeValues` in `tree_kernels`."""
        return cls(**dict(zip((LOG_PROBS, ENTROPY, SUM_PI_SQUARED), per_edge, strict=True)))

    @classmethod
    def zeros(cls, names: Wanted, size: int, device: torch.device) -> "EdgeOutputs":
        """Float32 zeros [size] under the given names."""
        return cls.of({name: torch.zeros(size, device=device) for name in names})

    @classmethod
    def of(cls, named: Mapping[str, torch.Tensor]) -> "EdgeOutputs":
        """Outputs from a mapping; raises ValueError for an unknown name."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(named) - set(known))
        if unknown:
            raise ValueError(f"outputs: expected names among {', '.join(known)}, received {unknown[0]!r}")
        return cls(**named)
