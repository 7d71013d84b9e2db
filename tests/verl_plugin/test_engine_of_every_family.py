"""Models with recurrent layers, experts or latent attention in verl's FSDP2 engine train as stock verl does on rows
alone, cut or whole.

Stock verl packs rows into one sequence, along which recurrent layers carry their state from row to row: the yardstick
runs one row a micro-batch.
"""

from pathlib import Path

import pytest
import torch
from engine_harness import build_engine, save_model
from equivalence import ALONE, LOSS, assert_equal_gradients, run
from hostile_rows import whole_batch
from rank_processes import run_ranks
from tiny_families import ATTENTION, CONFIGS, GATED_DELTA_NET, RECURRENT, assert_trains, save_hybrid

from tree_rl.verl_plugin.options import TreeConfig


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


def test_adapters_of_latent_attention(tmp_path: Path) -> None:
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}
    assert_trains(save_model(tmp_path, CONFIGS["deepseek_v3"]), ("comb",), **lora)


def sharing_main(rank: int, model: Path, out: Path) -> None:
    """One of two ranks that share the tokens of all shapes, whole and in partitions."""
    for tokens in (1000, 13):
        tree = TreeConfig(mode="tree", max_tokens=tokens)
        engine = build_engine(model, tree=tree, engine={"ulysses_sequence_parallel_size": 2})
        torch.save(run(engine, whole_batch(), LOSS)["gradients"], f"{out}/gradients_{tokens}_{rank}.pt")


def test_ranks_that_share_tokens_of_latent_attention(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", CONFIGS["deepseek_v3"])
    run_ranks(sharing_main, 2, path, tmp_path)
    expected = run(build_engine(path, tree=None), whole_batch(**ALONE), LOSS)["gradients"]
    for saved in tmp_path.glob("gradients_*.pt"):
        assert_equal_gradients(expected, torch.load(saved))
