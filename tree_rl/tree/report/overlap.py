"""How much the rows of a forest overlap, and what that can save. Legend: N unique tokens, F flat tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tree_rl.tree.forest import Forest
from tree_rl.tree.forest.jagged import Jagged


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """What a forest computes (unique) and what its rows would compute one by one (flat)."""

    paths: int
    """Number of rows."""
    unique_tokens: int
    """N, unique tokens."""
    flat_tokens: int
    """F, tokens of all rows."""
    unique_pairs: int
    """Visible (query, key) pairs of the forest."""
    flat_pairs: int
    """Visible (query, key) pairs of all rows."""
    unique_head_tokens: int
    """Unique tokens with a loss in at least one row, for which the language-model head runs."""
    flat_head_tokens: int
    """Tokens with a loss, summed over rows."""
    depth: int
    """Length of the longest row."""

    @property
    def por(self) -> float:
        """Potential overlap ratio 1 - N / F; 0 without tokens."""
        return 1.0 - self.unique_tokens / self.flat_tokens if self.flat_tokens else 0.0

    @property
    def token_bound(self) -> float:
        """Largest speed-up counted in tokens, 1 / (1 - POR); 1 without tokens."""
        return self.flat_tokens / self.unique_tokens if self.unique_tokens else 1.0


def measure_forest(forest: Forest, *, trained: Jagged | None = None) -> Overlap:
    """Overlap of a forest; ``trained`` [B, L_b] is nonzero where a row's token has a loss, None means everywhere."""
    lengths = forest.row_index.lengths
    head_tokens = forest.num_unique if trained is None else np.count_nonzero(forest.rows_that_mark(trained))
    return Overlap(
        paths=forest.num_rows,
        unique_tokens=forest.num_unique,
        flat_tokens=forest.num_flat,
        unique_pairs=forest.num_pairs,
        flat_pairs=int((lengths * (lengths + 1) // 2).sum()),
        unique_head_tokens=int(head_tokens),
        flat_head_tokens=forest.num_flat if trained is None else int((trained.values != 0).sum()),
        depth=int(lengths.max(initial=0)),
    )


def combine(parts: Sequence[Overlap]) -> Overlap:
    """Sum over parts, such as groups or ranks; ``depth`` is the maximum."""
    names = [name for name in Overlap.__slots__ if name != "depth"]
    totals = {name: sum(getattr(part, name) for part in parts) for name in names}
    return Overlap(**totals, depth=max((part.depth for part in parts), default=0))
