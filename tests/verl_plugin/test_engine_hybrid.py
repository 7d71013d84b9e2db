"""Models with Gated DeltaNet layers in verl's FSDP2 engine train as stock verl does on rows alone, cut or whole.

Stock verl packs rows into one sequence, along which such layers carry their state from row to row: the yardstick runs
one row a micro-batch.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from engine_harness import VOCAB, build_engine, ppo_batch
from equivalence import actor_loss, assert_equal_runs, run, wanted_positions
from hostile_rows import shapes
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    Lfm2Config,
    PretrainedConfig,
    Qwen3NextConfig,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from verl.utils import tensordict_utils as tu

from tree_rl.verl_plugin.options import TreeConfig
from tree_rl.verl_plugin.refusals.refusal import UnsupportedFeatureError

SHAPES = shapes()
FLAGS = {"calculate_entropy": True, "return_model_output": True}
ALONE = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_next": Qwen3NextConfig(**SIZES, **EXPERTS, mlp_only_layers=[0, 1, 2, 3]),
    "qwen3_5": Qwen3_5TextConfig(**SIZES),
}


NO_GATED_DELTA_NET = {key: value for key, value in SIZES.items() if not key.startswith(("linear", "head_dim"))}
RECURRENT: dict[str, PretrainedConfig] = {
    "lfm2": Lfm2Config(
        **NO_GATED_DELTA_NET, block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention", "conv", "conv"]
    ),
    "granite_4": GraniteMoeHybridConfig(
        **NO_GATED_DELTA_NET,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=24,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_expand=2,
        mamba_chunk_size=16,
    ),
}


def save_hybrid(path: Path, config: PretrainedConfig) -> Path:
    """A random hybrid on disk, whose states decay slowly: stock's float32 sums of large decays are no yardstick."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.uniform_(parameter, -4.0, -1.0)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_hybrid(tmp_path_factory.mktemp(name), config) for name, config in CONFIGS.items()}


@pytest.fixture(scope="module")
def engines(paths: dict[str, Path]) -> dict[tuple[str, int | None], Any]:
    """Updates of stock engines under None, tree engines under their budget."""
    built: dict[tuple[str, int | None], Any] = {}
    for name, path in paths.items():
        built[name, None] = alone(build_engine(path, tree=None))
        for budget in (3, 17, 1000):
            built[name, budget] = build_engine(path, tree=TreeConfig(mode="auto", max_tokens=budget))
    return built


def alone(stock: Any) -> Callable[[str], dict[str, Any]]:
    """The update of a stock engine on the rows of a shape, each alone: once a shape, for it is what takes long."""
    loss = actor_loss("vanilla", "token-mean")
    return functools.cache(lambda name: run(stock, ppo_batch(SHAPES[name], **FLAGS, **ALONE), loss))


def compare(stock: Callable[[str], dict[str, Any]], tree: Any, name: str) -> dict[str, Any]:
    got = run(tree, ppo_batch(SHAPES[name], **FLAGS), actor_loss("vanilla", "token-mean"))
    assert_equal_runs(stock(name), got, wanted_positions(ppo_batch(SHAPES[name])), ("log_probs", "entropy"))
    return got


@pytest.mark.parametrize("name", SHAPES)
def test_every_hostile_shape_in_partitions(engines: dict[tuple[str, int | None], Any], name: str) -> None:
    compare(engines["qwen3_next", None], engines["qwen3_next", 17], name)


@pytest.mark.parametrize("name", ("branches", "strict_prefix", "masks_differ_on_shared_prefix", "two_groups"))
def test_whole_forests(engines: dict[tuple[str, int | None], Any], name: str) -> None:
    compare(engines["qwen3_next", None], engines["qwen3_next", 1000], name)


@pytest.mark.parametrize(("family", "budget"), (("qwen3_next", 3), ("qwen3_5", 3), ("qwen3_5", 17), ("qwen3_5", 1000)))
def test_other_budgets_and_families(engines: dict[tuple[str, int | None], Any], family: str, budget: int) -> None:
    compare(engines[family, None], engines[family, budget], "branch_at_63_64_65")


@pytest.mark.parametrize("budget", (17, 1000))
@pytest.mark.parametrize("family", RECURRENT)
def test_short_convolutions_and_mamba_2(tmp_path: Path, family: str, budget: int) -> None:
    path = save_hybrid(tmp_path, RECURRENT[family])
    tree = build_engine(path, tree=TreeConfig(mode="auto", max_tokens=budget))
    compare(alone(build_engine(path, tree=None)), tree, "branch_at_63_64_65")


def test_rows_that_share_nothing_run_as_a_forest_too(engines: dict[tuple[str, int | None], Any]) -> None:
    got = compare(engines["qwen3_next", None], engines["qwen3_next", 1000], "no_common_root")
    assert len(got["loss"]) == 1


@pytest.mark.parametrize("budget", (7, 1000))
def test_gradient_checkpointing(paths: dict[str, Path], budget: int) -> None:
    model = {"enable_gradient_checkpointing": True}
    stock = alone(build_engine(paths["qwen3_next"], tree=None, model=model))
    tree = build_engine(paths["qwen3_next"], tree=TreeConfig(mode="tree", max_tokens=budget), model=model)
    compare(stock, tree, "comb")


def test_packing_rows_flat_is_refused(paths: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"tree\.mode=flat"):
        build_engine(paths["qwen3_next"], tree=TreeConfig(mode="flat"))


STEPS = 2
ROWS_OF_RANK = ([0, 1, 2], [3, 4, 5, 6])


def steps_of(engine: Any, rows_of_rank: list[int] | None, **flags: Any) -> dict[str, torch.Tensor]:
    """Weights after two optimizer steps on a share of the rows, or on all of them."""
    rows = [*SHAPES["branches"], *SHAPES["branch_at_63_64_65"]]
    with engine.train_mode(disable_auto_offload=True):
        for step in range(STEPS):
            data = ppo_batch(rows, seed=step, calculate_entropy=True, **flags)
            share = data if rows_of_rank is None else tu.index_select_tensor_dict(data, rows_of_rank)
            engine.train_batch(share, actor_loss("vanilla", "token-mean"))
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}


def rank_main(rank: int, world: int, model: str, out: str, port: int) -> None:
    """Two steps on this rank's rows, in partitions."""
    sys.path.insert(0, str(Path(__file__).parent))
    from test_engine_ranks import join

    join(rank, world, port)
    engine = build_engine(Path(model), tree=TreeConfig(mode="tree", max_tokens=40))
    torch.save(steps_of(engine, ROWS_OF_RANK[rank]), f"{out}/weights_{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_take_the_two_steps_of_stock_verl_on_one(tmp_path: Path) -> None:
    from test_engine_ranks import spawn

    save_hybrid(tmp_path / "model", CONFIGS["qwen3_next"])
    spawn(rank_main, 2, tmp_path)
    expected = steps_of(build_engine(tmp_path / "model", tree=None), None, **ALONE)
    start = steps_start(tmp_path / "model")
    for rank in range(2):
        weights = torch.load(tmp_path / f"weights_{rank}.pt")
        assert weights.keys() == expected.keys()
        for name, reference in expected.items():
            # Adam divides by the gradient's size, so where that is near zero its rounding moves the weight.
            moved = (reference - start[name]).norm()
            assert moved > 0, name
            assert (weights[name] - reference).norm() <= 2e-3 * moved, name


def steps_start(path: Path) -> dict[str, torch.Tensor]:
    """Weights before the first step."""
    parameters = build_engine(path, tree=None).get_per_tensor_param()[0]
    return {name: tensor.clone() for name, tensor in parameters}
