"""On a GPU: float32 equals rows alone, and bf16 is no further from float32 than stock bf16 is."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import ALONE, BFLOAT16, FLAGS, build_engine, ppo_batch, save_model, tiny_qwen3
from equivalence import LOSS, alone, assert_equal_runs, assert_trains_as, run, wanted_positions
from hostile_rows import Row, row
from rank_processes import run_ranks
from reused_log_probs import run_after_pass, without_pass
from verl_losses import actor_loss

from tree_kernels.tree_attention import chosen_implementation
from tree_rl.verl_plugin.options import TreeConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB = 1000
MIXED = {"mixed_precision": BFLOAT16}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    widths = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    config = tiny_qwen3(vocab_size=VOCAB, max_position_embeddings=4096, initializer_range=0.05, **widths)
    return save_model(tmp_path_factory.mktemp("model"), config)


def agent_rows(seed: int = 0) -> list[Row]:
    """Two prompts of eight branches, and a trunk whose turns leave stubs."""
    draw = np.random.default_rng(seed)
    rows = []
    for uid in ("a", "b"):
        prompt = draw.integers(1, VOCAB, 300).tolist()
        for branch in range(8):
            rows.append(row([*prompt, *draw.integers(1, VOCAB, 90)], prompt=300, uid=uid, advantage=branch / 4 - 1))
    trunk = draw.integers(1, VOCAB, 700).tolist()
    for turn in range(5):
        length = 200 + 100 * turn
        rows.append(row([*trunk[:length], *draw.integers(1, VOCAB, 40)], prompt=50, uid="c", advantage=turn / 2 - 1))
    return rows


def gradient_error(run_: dict[str, Any], truth: dict[str, Any]) -> float:
    names = truth["gradients"]
    off = sum(float((run_["gradients"][n].float() - truth["gradients"][n]).square().sum()) for n in names)
    return (off / sum(float(truth["gradients"][n].square().sum()) for n in names)) ** 0.5


def test_kernels_made_for_trees_are_what_runs(model_path: Path) -> None:
    wanted = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_size": 64}
    chosen = chosen_implementation(**wanted)
    assert chosen in ("fa4", "triton")
    assert chosen_implementation(**wanted, deterministic=True) == "triton"
    assert build_engine(model_path, tree=TreeConfig(), engine=MIXED).attention_implementation == chosen


def test_float32_equals_rows_alone(model_path: Path) -> None:
    expected = alone(build_engine(model_path, tree=None), agent_rows())
    assert_trains_as(expected, build_engine(model_path, tree=TreeConfig(mode="tree")), agent_rows())


POLICY = {"offload_policy": True, "use_no_sync_for_gradient_accumulation": False}


@pytest.mark.parametrize("options", (POLICY, {"param_offload": True, "optimizer_offload": True}), ids=" ".join)
def test_weights_in_host_memory_train_as_on_rows_alone(model_path: Path, options: dict[str, Any]) -> None:
    rows = agent_rows()
    expected = alone(build_engine(model_path, tree=None), rows)
    engine = build_engine(model_path, tree=TreeConfig(mode="tree", max_tokens=900), engine=options)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(ppo_batch(rows, **FLAGS), LOSS)
        got = {name: weight.grad.to("cuda").full_tensor().clone() for name, weight in engine.module.named_parameters()}
        norm = engine.optimizer_step()
    assert torch.isfinite(torch.tensor(float(norm)))
    gradients = {name: gradient.cuda() for name, gradient in expected["gradients"].items()}
    wanted = wanted_positions(ppo_batch(rows)).cpu()
    assert_equal_runs({**expected, "gradients": gradients}, {**output, "gradients": got}, wanted, ("log_probs",))


def test_a_reference_policy_in_host_memory_sees_what_rows_alone_see(model_path: Path) -> None:
    data = ppo_batch(agent_rows())
    wanted, outputs = wanted_positions(data), []
    for tree, options in ((None, {}), (TreeConfig(mode="tree"), {"forward_only": True})):
        engine = build_engine(model_path, tree=tree, engine=options)
        with engine.eval_mode():
            outputs.append(engine.infer_batch(data)["model_output"]["log_probs"].values().cpu()[wanted])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=2e-5, atol=2e-5)


def test_bfloat16_is_no_further_from_float32_than_stock_bfloat16(model_path: Path) -> None:
    # A loss without clipping: a clip that flips by rounding would drown the rounding of the forward itself.
    loss = actor_loss("gpg", "token-mean")
    truth_engine = build_engine(model_path, tree=None)
    stock_engine = build_engine(model_path, tree=None, engine=MIXED)
    tree_engine = build_engine(model_path, tree=TreeConfig(mode="tree"), engine=MIXED)
    pairs = []
    for seed in range(6):
        rows = agent_rows(seed)
        truth = run(truth_engine, ppo_batch(rows, seed=seed, calculate_entropy=True, **ALONE), loss)
        stock = run(stock_engine, ppo_batch(rows, seed=seed, calculate_entropy=True, **ALONE), loss)
        tree = run(tree_engine, ppo_batch(rows, seed=seed, calculate_entropy=True), loss)
        pairs.append((gradient_error(stock, truth), gradient_error(tree, truth)))
    stock_error, tree_error = np.array(pairs).T
    print(f"bf16 gradient error against float32: rows alone {stock_error}, tree {tree_error}")
    excess = tree_error - stock_error
    assert excess.mean() <= 2 * excess.std(ddof=1) / len(excess) ** 0.5


@pytest.mark.parametrize("max_tokens", (None, 700), ids=("whole", "partitioned"))
def test_an_update_finds_its_old_log_probs_up_to_bfloat16_rounding(model_path: Path, max_tokens: int | None) -> None:
    rows, flags = agent_rows(), {"calculate_entropy": True}
    truth = run_after_pass(build_engine(model_path, tree=None), rows, LOSS, **flags)
    engine = build_engine(model_path, tree=TreeConfig(mode="tree", max_tokens=max_tokens), engine=MIXED)
    after_pass = run_after_pass(engine, rows, LOSS, **flags)
    got = run(engine, without_pass(rows, **flags), LOSS)
    assert gradient_error(got, after_pass) <= gradient_error(after_pass, truth)
    assert sum(got["loss"]) == pytest.approx(sum(after_pass["loss"]), rel=2e-2, abs=1e-3)


@contextmanager
def at_most(num_bytes: float, how: str) -> Iterator[None]:
    """So much memory for tensors: by a limit of this process, or because the rest of the device is taken."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    ballast = None
    try:
        if how == "limit":
            torch.cuda.set_per_process_memory_fraction(num_bytes / total)
        else:
            taken = int(free + torch.cuda.memory_reserved() - num_bytes)
            ballast = torch.empty(taken, dtype=torch.uint8, device="cuda")
        yield
    finally:
        del ballast
        torch.cuda.empty_cache()  # for the processes of later tests
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("how", ("limit", "full_device"))
def test_out_of_memory_repeats_the_step_with_a_smaller_budget(model_path: Path, how: str) -> None:
    data = ppo_batch([row for seed in range(12) for row in agent_rows(seed)], calculate_entropy=True)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    expected = run(build_engine(model_path, tree=TreeConfig(mode="tree")), data, LOSS)
    peak = torch.cuda.max_memory_allocated()
    engine = build_engine(model_path, tree=TreeConfig(mode="tree"))
    with at_most(0.85 * peak, how):
        got = run(engine, data, LOSS)
    assert engine.step.out_of_memory == 1
    assert got["metrics"]["tree/out_of_memory"].aggregate() == 1
    assert gradient_error(got, expected) < 1e-5


def starving_main(rank: int, model: Path) -> str:
    """The same update with memory for all, and with too little on rank 1; bytes and budget."""
    rows = [row for seed in range(12) for row in agent_rows(seed + 100 * rank)]
    data = ppo_batch(rows, calculate_entropy=True, global_batch_size=2 * len(rows))
    engine = build_engine(model, tree=TreeConfig(mode="tree", self_check=False))
    expected = run(engine, data, LOSS)
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    if rank == 1:
        total = torch.cuda.get_device_properties(rank).total_memory
        torch.cuda.set_per_process_memory_fraction(0.8 * peak / total, rank)
    got = run(engine, data, LOSS)
    assert engine.step.out_of_memory == 1
    assert gradient_error(got, expected) < 1e-5
    return f"{peak / 2**20:.0f} MiB, then {engine.step.learner.budget.tokens} tokens"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_repeat_a_step_together_when_one_runs_out_of_memory(model_path: Path) -> None:
    print(*run_ranks(starving_main, 2, model_path, backend="cpu:gloo,cuda:nccl"), sep="\n")


def test_auto_budget_follows_from_the_first_update(model_path: Path) -> None:
    engine = build_engine(model_path, tree=TreeConfig(mode="tree", max_tokens="auto"))
    run(engine, ppo_batch(agent_rows(), calculate_entropy=True), LOSS)
    learnt = engine.step.learner.budget.tokens
    assert learnt is not None and learnt >= 1024
    run(engine, ppo_batch(agent_rows(1), calculate_entropy=True), LOSS)
    assert engine.step.learner.budget.tokens == learnt
