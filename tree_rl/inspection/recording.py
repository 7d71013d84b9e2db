"""What a file of rows held: the rows, the columns that they came from, and those that could name their group."""

from collections.abc import Sequence
from dataclasses import dataclass

from tree_rl.inspection.row import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Columns of a file by what they became; None: the file has none."""

    tokens: tuple[str, ...]
    """Columns of token ids, texts or messages, laid end to end."""
    loss: str | None
    """Which tokens the model sampled: a column of marks, or a rule in words."""
    padding: str | None
    """Column that is 0 at padding."""
    group: str | None
    """Column whose equal values form a group; None: the whole file is one group."""

    def __str__(self) -> str:
        """One line for a reader."""
        parts = [
            f"tokens: {' + '.join(self.tokens)}",
            f"loss: {self.loss or 'no mask found, every token counts'}",
            f"padding: {self.padding or 'no attention_mask, none is dropped'}",
            f"group: {self.group or 'none found, the file is one group'}",
        ]
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recording:
    """Rows of one file, or of several."""

    rows: list[Row]
    taken: tuple[Taken, ...]
    """What was taken of the files, each set of columns once."""
    labels: dict[str, list[str]]
    """Column that could name the group -> its value for each row. Empty where every file names its groups."""

    @property
    def has_groups(self) -> bool:
        """Whether every file names its groups."""
        return all(taken.group is not None for taken in self.taken)

    @classmethod
    def joined(cls, parts: Sequence["Recording"]) -> "Recording":
        """Files one after the other; a column could name the group if it could in each of them."""
        common = [name for name in parts[0].labels if all(name in part.labels for part in parts)]
        return cls(
            rows=[row for part in parts for row in part.rows],
            taken=tuple(dict.fromkeys(taken for part in parts for taken in part.taken)),
            labels={name: [value for part in parts for value in part.labels[name]] for name in common},
        )
