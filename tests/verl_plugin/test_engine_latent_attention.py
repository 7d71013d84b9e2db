"""Models with multi-head latent attention train in verl's FSDP2 engine as on rows alone.

Whole and in partitions, with recomputed layers, adapters, and two ranks that share tokens.
Every family in every budget is held without an engine in `models/test_latent_attention_runs_in_partitions.py`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import VOCAB, build_engine, save_model
from equivalence import ALONE, LOSS, alone, assert_equal_gradients, assert_trains_as
from hostile_rows import SHAPES
from latent_models import latent_configs
from layouts_of_four_ranks import update, whole_batch
from rank_engines import join, spawn
from transformers import AutoModelForCausalLM

from tree_rl.verl_plugin.options import TreeConfig

FAMILIES = latent_configs(vocab_size=VOCAB, max_position_embeddings=512, initializer_range=0.1)
DEFAULT = ("deepseek_v3",)
PARAMS = [pytest.param(family, marks=() if family in DEFAULT else pytest.mark.slow) for family in FAMILIES]
LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}
RECOMPUTES = {"enable_gradient_checkpointing": True}


@pytest.fixture(scope="module", params=PARAMS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on disk; where its routers have a bias, that of a trained one."""
    return save(tmp_path_factory.mktemp(request.param), request.param)


def save(folder: Path, family: str) -> Path:
    path = save_model(folder, FAMILIES[family])
    model = AutoModelForCausalLM.from_pretrained(path)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    model.save_pretrained(path)
    return path


def trees(path: Path, **build: Any) -> list[Any]:
    """Engines that run a batch whole, and in partitions of 16 and of 3 tokens."""
    budgets = ((1000, {}), (16, {}), (3, RECOMPUTES))
    return [
        build_engine(path, tree=TreeConfig(mode="tree", max_tokens=tokens), model=model | build)
        for tokens, model in budgets
    ]


def test_whole_and_in_partitions(path: Path) -> None:
    stock, engines = build_engine(path, tree=None), trees(path)
    for rows in (SHAPES["comb"], SHAPES["masks_differ_on_shared_prefix"]):
        expected = alone(stock, rows)
        for engine in engines:
            assert_trains_as(expected, engine, rows)


def test_adapters(path: Path) -> None:
    stock, engines = build_engine(path, tree=None, model=LORA), trees(path, **LORA)
    expected = alone(stock, SHAPES["comb"])
    for engine in engines:
        got = assert_trains_as(expected, engine, SHAPES["comb"])
        assert got["gradients"] and all("lora" in name for name in got["gradients"])


def sharing_main(rank: int, world: int, model: str, out: str, port: int) -> None:
    """One of two ranks that share the tokens of all shapes, whole and in partitions."""
    join(rank, world, port)
    for tokens in (1000, 13):
        engine = build_engine(
            Path(model),
            tree=TreeConfig(mode="tree", max_tokens=tokens),
            engine={"ulysses_sequence_parallel_size": world},
        )
        torch.save(update(engine, whole_batch(), LOSS)["gradients"], f"{out}/gradients_{tokens}_{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("family", PARAMS)
def test_two_ranks_that_share_tokens(tmp_path: Path, family: str) -> None:
    path = save(tmp_path / "model", family)
    spawn(sharing_main, 2, tmp_path)
    expected = update(build_engine(path, tree=None), whole_batch(**ALONE), LOSS)["gradients"]
    for saved in (tmp_path / f"gradients_{tokens}_{rank}.pt" for tokens in (1000, 13) for rank in range(2)):
        assert_equal_gradients(expected, torch.load(saved))
