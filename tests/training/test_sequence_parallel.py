"""Ranks that share a forest's tokens: outputs and gradients of rows run alone, in float32, for any model and shape."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from sharing_ranks import CRITIC, LORA, MODELS, SHAPES, Case, rank_main, spawn

FOUR_SHARE = [
    *(Case(shapes=(shape,), max_tokens=budget) for shape in SHAPES for budget in (None, 6)),
    *(Case(model=model, shapes=("comb",), max_tokens=budget) for model in MODELS[1:] for budget in (None, 5)),
    Case(shapes=("branches",), max_tokens=4, is_coupled=True),
    Case(shapes=("comb",), max_tokens=6, is_sharded=True),
]
"""One group of four ranks."""
TWO_SHARE = [
    *(Case(shapes=shapes, max_tokens=6) for shapes in pairwise(SHAPES)),
    *(Case(model=model, shapes=("branches", "comb"), max_tokens=7) for model in MODELS[1:]),
    Case(shapes=("comb", "two_tokens"), is_coupled=True, is_sharded=True),
    Case(shapes=("long_trunk", ""), max_tokens=9, is_sharded=True),
    Case(model=CRITIC, shapes=("one_token", "branches"), is_sharded=True),
    Case(model=LORA, shapes=("", "long_trunk")),
]
"""Two groups of two ranks, each with rows of its own."""


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What failed on any of four ranks, by case."""
    out: Path = tmp_path_factory.mktemp("ranks")
    spawn(rank_main, 4, out, [(4, FOUR_SHARE), (2, TWO_SHARE)])
    found: dict[str, str] = {}
    for rank in range(4):
        found |= json.loads((out / f"failures_{rank}.json").read_text())
    return found


@pytest.mark.parametrize("size", [4, 2])
def test_ranks_that_share_tokens_train_as_rows_alone(failures: dict[str, str], size: int) -> None:
    own = {name: text for name, text in failures.items() if name.startswith(f"{size}:")}
    assert not own, "\n".join(f"{name}\n{text}" for name, text in own.items())
