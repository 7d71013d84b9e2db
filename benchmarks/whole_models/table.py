"""Results of whole models for a terminal: an arm a line, or the largest deviation of losses."""

from collections.abc import Iterator, Mapping, Sequence

from tree_rl.inspection.text import format_table
from whole_models.arms import PACKED, STOCK
from whole_models.curves import PAIRS

HEADER = (
    *("arm", "s", "old log-probs s", "update s", "exposed s", "imbalance", "peak GiB", "gradient error"),
    *("over packed", "of bound", "over verl"),
)


def format_results(rows: Sequence[Mapping[str, object]]) -> str:
    """Tables of the rows that `whole_model.py` writes."""
    if "step" in rows[0]:
        deviations = [f"loss_{name}_to_{other}" for name, other in PAIRS]
        return "\n".join(f"largest {name}: {max(_number(row, name) for row in rows):.3g}" for name in deviations)
    return "\n".join(_table(row) for row in rows)


def _table(row: Mapping[str, object]) -> str:
    names = [name.removesuffix("_s_low") for name in row if name.endswith("_s_low")]
    head = (
        f"\n{row['model']}, {row['layers']} layers, {row['gpus']} GPUs, {row['batch']}: POR {row['por']:.3f}, "
        f"{row['flat_tokens']:,} flat tokens, FLOP bound {row['flop_bound']:.3f}\n"
    )
    return head + format_table(HEADER, [tuple(_cells(row, name)) for name in names])


def _cells(row: Mapping[str, object], name: str) -> Iterator[str]:
    yield name
    seconds, low, high = (_number(row, f"{name}_{column}") for column in ("s", "s_low", "s_high"))
    yield f"{seconds:.3f} ({low:.3f} to {high:.3f})"
    for column in ("old_log_probs_s", "update_s", "exposed_s", "imbalance"):
        yield f"{_number(row, f'{name}_{column}'):.3f}"
    yield f"{_number(row, f'{name}_peak_gib'):.1f}"
    yield f"{_number(row, f'{name}_gradient_error'):.2e}"
    for column in (f"over_{PACKED}", f"over_{PACKED}_of_bound", f"over_{STOCK}"):
        yield f"{_number(row, f'{name}_{column}'):.3f}" if f"{name}_{column}" in row else ""


def _number(row: Mapping[str, object], name: str) -> float:
    return float(str(row[name]))
