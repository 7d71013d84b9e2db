"""Ranks that share a forest's tokens: outputs and gradients of rows run alone, in float32, for any model and shape."""

import json
from pathlib import Path

import pytest
from sharing_ranks import MODELS, SHAPES, Case, rank_main, spawn

EVERY_SHAPE = [Case(shapes=(shape,), max_tokens=budget) for shape in SHAPES for budget in (None, 6)]
EVERY_MODEL = [
    Case(model=model, shapes=(shape,), max_tokens=budget)
    for model in MODELS
    for shape, budget in (("comb", None), ("branches", 5))
    if model != "qwen3"
]
COUPLED = [Case(shapes=("comb",), max_tokens=budget, is_coupled=True) for budget in (None, 4)]
SHARDED = [Case(shapes=("comb",), max_tokens=budget, is_sharded=True) for budget in (None, 6)]
ALONE = [*EVERY_SHAPE, *EVERY_MODEL, *COUPLED, *SHARDED]
TWO_GROUPS = [
    Case(shapes=shapes, max_tokens=budget, is_sharded=is_sharded)
    for shapes in (("comb", "one_row"), ("branches", ""), ("long_trunk", "two_tokens"))
    for budget in (None, 9)
    for is_sharded in (False, True)
]
DEALS = {2: [(2, ALONE)], 4: [(4, ALONE), (2, TWO_GROUPS)]}


@pytest.fixture(scope="module", params=[2, 4])
def failures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What failed on any rank of so many, by case."""
    out: Path = tmp_path_factory.mktemp("ranks")
    spawn(rank_main, request.param, out, DEALS[request.param])
    found: dict[str, str] = {}
    for rank in range(request.param):
        found |= json.loads((out / f"failures_{request.param}_{rank}.json").read_text())
    return found


def test_every_case_equals_rows_alone(failures: dict[str, str]) -> None:
    assert not failures, "\n".join(f"{name}\n{text}" for name, text in failures.items())
