"""The memory model against the peaks that the benchmark of deep trunks measured on an H200."""

import csv
from pathlib import Path
from typing import Any

import pytest

from tree_rl.benchmark.model_sizes import MODEL_SIZES
from tree_rl.training.memory.measures import MemoryMeasures
from tree_rl.training.memory.model import TRITON_CHUNK_TENSORS, MemoryModel

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
GIB = 2**30
MEMORY = 139.8 * GIB
FILES = sorted(FOLDER.glob("deep_trunks_*.csv"))
ROWS = [row for path in FILES for row in csv.DictReader(path.read_text().splitlines()) if row["peak_gib"]]


def measures_of(plan: str, layers: int) -> MemoryMeasures:
    words = dict(word.partition(":")[::2] for word in plan.split("+"))
    return MemoryMeasures(
        offloaded_layers=int(words["offloaded"] or layers) if "offloaded" in words else 0,
        tile_tokens=int(words["tiled"]) if "tiled" in words else None,
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['layers']}-{row['unique']}-{row['plan']}")
def test_measured_peaks_are_predicted(row: dict[str, Any]) -> None:
    shape = MODEL_SIZES[row["model"]].with_layers(int(row["layers"])).shape
    model = MemoryModel(
        shape=shape,
        fused=row["layer_kernels"] == "liger",
        head_norms=True,
        # A chunk of logits is a share of the GPU's memory.
        logits_bytes=MEMORY / 64,
        chunk_tensors=TRITON_CHUNK_TENSORS,
        sums_query_gradients=bool(row["flash_attn_4"]),
    )
    trained = int(row["branches"]) * int(row["branch_tokens"])
    peak = model.whole(int(row["unique"]), trained, measures_of(row["plan"], shape.layers))
    of_layers = shape.cost.per_token / 6 + 2 * shape.vocab * shape.hidden
    weights_and_gradients = 2 * model.value_bytes * of_layers
    assert (weights_and_gradients + peak.device) / GIB == pytest.approx(float(row["peak_gib"]), rel=0.02)
    assert peak.host / GIB == pytest.approx(float(row["host_gib"]), rel=0.01)
