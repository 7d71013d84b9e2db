"""Models with recurrent layers, experts or latent attention in verl's FSDP2 engine train as stock verl does on rows
alone, cut or whole.

Stock verl packs rows into one sequence, along which recurrent layers carry their state from row to row: the yardstick
runs one row a micro-batch.
"""

from pathlib import Path

import pytest
from engine_harness import build_engine, save_model
from equivalence import alone, assert_trains_as
from hostile_rows import SHAPES
from tiny_families import ATTENTION, CONFIGS, GATED_DELTA_NET, RECURRENT, save_hybrid, wrapped_apart

from tree_rl.verl_plugin.options import TreeConfig


def assert_trains(path: Path, shapes: tuple[str, ...], attention: str = "sdpa") -> None:
    """Whole, and cut to a few tokens with recomputed layers, as stock verl on rows alone."""
    stock = build_engine(path, tree=None, attention=attention, engine=wrapped_apart(path))
    checkpointing = {"enable_gradient_checkpointing": True}
    trees = [
        build_engine(path, tree=TreeConfig(mode="auto", max_tokens=1000), attention=attention),
        build_engine(path, tree=TreeConfig(mode="tree", max_tokens=3), attention=attention, model=checkpointing),
    ]
    for shape in shapes:
        expected = alone(stock, SHAPES[shape])
        for tree in trees:
            assert_trains_as(expected, tree, SHAPES[shape])


@pytest.mark.parametrize(
    "family",
    (
        *("qwen3_next", "nemotron_h", "zamba2"),
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3_5", "lfm2", "granite_4", "falcon_h1")),
    ),
)
def test_recurrent_layers(tmp_path: Path, family: str) -> None:
    path = save_hybrid(tmp_path, (GATED_DELTA_NET | RECURRENT)[family])
    assert_trains(path, ("comb", "no_common_root"))


@pytest.mark.parametrize(
    "family",
    ("gpt_oss", "deepseek_v3", *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3_moe", "mixtral"))),
)
def test_experts(tmp_path: Path, family: str) -> None:
    assert_trains(save_model(tmp_path, CONFIGS[family]), ("comb", "identical"), ATTENTION[family])
