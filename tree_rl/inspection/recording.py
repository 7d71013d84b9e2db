"""The contents of a file of rows: the rows, the columns they came from, and columns that could name their group."""

from collections.abc import Sequence
from dataclasses import dataclass

from tree_rl.inspection.row import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """The columns that were read, by purpose; None if the file has none."""

    tokens: tuple[str, ...]
    """Columns of token ids, texts or messages, concatenated in this order."""
    loss: str | None
    """Source of the loss mask: a column, or a rule in words."""
    padding: str | None
    """Column that is 0 at padding."""
    group: str | None
    """Column whose equal values form a group; None: the whole file is one group."""

    def __str__(self) -> str:
        parts = [
            f"tokens: {' + '.join(self.tokens)}",
            f"loss: {self.loss or 'no mask found, every token counts'}",
            f"padding: {self.padding or 'no attention_mask, none is dropped'}",
            f"group: {self.group or 'none found, the file is one group'}",
        ]
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recording:
    """Rows of one or several files."""

    rows: list[Row]
    taken: tuple[Taken, ...]
    """The distinct sets of columns that were read."""
    labels: dict[str, list[str]]
    """Column that could name the group -> its value for each row. Empty if every file names its groups."""

    @property
    def has_groups(self) -> bool:
        """True if every file names its groups."""
        return all(taken.group is not None for taken in self.taken)

    @classmethod
    def joined(cls, parts: Sequence["Recording"]) -> "Recording":
        """Concatenate files; keeps the labels that all of them have."""
        common = [name for name in parts[0].labels if all(name in part.labels for part in parts)]
        return cls(
            rows=[row for part in parts for row in part.rows],
            taken=tuple(dict.fromkeys(taken for part in parts for taken in part.taken)),
            labels={name: [value for part in parts for value in part.labels[name]] for name in common},
        )
