"""The memory model against the peaks that the benchmark of deep trunks measured on an H200."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tree_rl.cost.memory.choice import Chooser
from tree_rl.cost.memory.model import GIB, TRITON_CHUNK_TENSORS, MemoryModel, MemorySaving
from tree_rl.cost.model_sizes import MODEL_SIZES
from tree_rl.tree.forest import Forest

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
MEMORY = 139.8 * GIB
FILES = sorted(FOLDER.glob("deep_trunks_*.csv"))
ALL = [row for path in FILES for row in csv.DictReader(path.read_text().splitlines()) if row["peak_gib"]]
BUDGETS = [row for row in ALL if row["plan"].startswith("budget:")]
ROWS = [row for row in ALL if row not in BUDGETS]


def measures_of(plan: str, layers: int) -> MemorySaving:
    words = dict(word.partition(":")[::2] for word in plan.split("+"))
    return MemorySaving(
        offloaded_layers=int(words["offloaded"] or layers) if "offloaded" in words else 0,
        tile_tokens=int(words["tiled"]) if "tiled" in words else None,
    )


def model_of(row: dict[str, Any]) -> MemoryModel:
    return MemoryModel(
        shape=MODEL_SIZES[row["model"]].with_layers(int(row["layers"])).shape,
        fused=row["layer_kernels"] == "liger",
        head_norms=True,
        # A chunk of logits is a share of the GPU's memory.
        logits_bytes=MEMORY / 64,
        chunk_tensors=TRITON_CHUNK_TENSORS,
        sums_query_gradients=bool(row["flash_attn_4"]),
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['layers']}-{row['unique']}-{row['plan']}")
def test_measured_peaks_are_predicted(row: dict[str, Any]) -> None:
    model = model_of(row)
    shape = model.shape
    trained = int(row["branches"]) * int(row["branch_tokens"])
    peak = model.whole(int(row["unique"]), trained, measures_of(row["plan"], shape.layers))
    of_layers = shape.cost.per_token / 6 + 2 * shape.vocab * shape.hidden
    weights_and_gradients = 2 * model.value_bytes * of_layers
    assert (weights_and_gradients + peak.device) / GIB == pytest.approx(float(row["peak_gib"]), rel=0.02)
    assert peak.host / GIB == pytest.approx(float(row["host_gib"]), rel=0.01)


@pytest.mark.parametrize("row", BUDGETS, ids=lambda row: f"{row['layers']}-{row['plan'].partition(' ')[0]}")
def test_peaks_of_what_a_budget_chooses_are_predicted(row: dict[str, Any]) -> None:
    trunk, branches, tokens = (int(row[name]) for name in ("trunk", "branches", "branch_tokens"))
    prompt = np.arange(trunk)
    answers = [trunk + branch * tokens + np.arange(tokens) for branch in range(branches)]
    forest = Forest.from_rows([np.concatenate([prompt, answer]) for answer in answers])
    chooser = Chooser(model=model_of(row))
    budget = int(row["plan"].partition(" ")[0].removeprefix("budget:"))
    choice = chooser.choose(forest, budget, head_share=branches * tokens / forest.num_unique)
    assert f"({choice.name})" in row["plan"]
    measured = float(row["peak_gib"]) - float(row["base_gib"])
    assert choice.peak.device / GIB == pytest.approx(measured, rel=0.1)
