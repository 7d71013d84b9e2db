"""`tree-rl plan --ranks`: laws of the predicted step, a case by hand, and what the command prints."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fixture_types import Printed, Refused
from hypothesis import given
from hypothesis import strategies as st
from record_files import write

from tree_rl.cost.cluster.hardware import OPTIMIZER_RATE, Cluster
from tree_rl.cost.cluster.parameters import Parameters
from tree_rl.cost.cluster.step import KEPT, StepModel, StepWork
from tree_rl.cost.cost_fit import CostFit, Work
from tree_rl.cost.cost_model import ModelShape
from tree_rl.cost.memory.model import assumed_memory_model
from tree_rl.cost.model_sizes import MODEL_SIZES
from tree_rl.inspection.row_file import read_row_file
from tree_rl.tree import Forest


def on(cluster: Cluster, size: str = "8b", **more: int | bool) -> StepModel:
    model = MODEL_SIZES[size]
    return StepModel(shape=model.shape, parameters=Parameters.of(model.shape, model.config), cluster=cluster, **more)


def work(*loads: float, tokens: int = 60_000, budget: int = 65_536) -> StepWork:
    """One mini-batch on ranks of these loads."""
    tokens_C = np.array([tokens])
    loads_C = {"load_C": np.array([max(loads)]), "mean_C": np.array([sum(loads) / len(loads)])}
    return StepWork(**loads_C, forwards_C=-(-tokens_C // budget), tokens_C=tokens_C, budget=budget)


SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "num_attention_heads")
MIXTRAL_8X7B = dict(zip(SIZES, (4096, 32, 14336, 32000, 32), strict=True)) | {"num_key_value_heads": 8}
MIXTRAL_8X7B |= {"num_local_experts": 8, "num_experts_per_tok": 2}
OLMOE_1B_7B = dict(zip(SIZES, (2048, 16, 1024, 50304, 16), strict=True))
OLMOE_1B_7B |= {"num_experts": 64, "num_experts_per_tok": 8}


@pytest.mark.parametrize(
    ("config", "published"), [(MIXTRAL_8X7B, 46.7e9), (OLMOE_1B_7B, 6.92e9)], ids=["Mixtral 8x7B", "OLMoE 1B-7B"]
)
def test_all_experts_count_where_the_mlp_width_is_theirs(config: dict[str, int], published: float) -> None:
    shape = ModelShape.from_config(config)
    assert shape.active_experts == config["num_experts_per_tok"] and not assumed_memory_model(shape).tiles
    assert Parameters.of(shape, config).total == pytest.approx(published, rel=0.01)


def test_one_gpu_sends_nothing() -> None:
    time = on(Cluster(gpus=1)).time(work(3e15))
    assert time.gathers == time.exchanges == time.waiting == 0
    # The mean of three equal loads, rounded, is above them.
    assert on(Cluster(gpus=3)).time(work(0.1, 0.1, 0.1)).waiting == 0
    # A forward and a backward cost three forwards; log-probs and the second forward of each layer one each.
    assert time.balanced == pytest.approx(5 / 3 * 3e15 / Cluster.flops)
    assert time.optimizer == pytest.approx(on(Cluster(gpus=1)).parameters.total / OPTIMIZER_RATE)


def test_replicas_add_up_gradients_by_hand() -> None:
    """Four GPUs, one or two copies of the parameters, and a link so slow that nothing hides it.

    With two copies each GPU's gradients of a layer cross once more.
    """
    cluster = Cluster(gpus=4, gpus_per_node=4, flops=1e30, link=1e9, latency=1e-12)
    sharded, replicated = (on(cluster, "tiny", shards=shards) for shards in (4, 2))
    layers, layer, root = 2, sharded.parameters.per_layer, sharded.parameters.root

    def seconds(ranks: int, *, halves: int) -> float:
        """Half a layer's gradients cross in 4 bytes, among two, there and back."""
        # In bf16 the root for log-probs and forward, layers for both and backward; the first's backward once more.
        gathered = 2 * (2 * root + 3 * layers * layer) + 2 * layer
        # Gradients in 4 bytes; those of the last layer are exposed alone.
        gathered += 4 * root + 4 * (layers + 1) * layer
        return (gathered * (ranks - 1) / ranks + halves * (layers + 1) * 2 * 4 * layer / 2 / 2) / 1e9

    assert sharded.time(work(1.0, tokens=10)).gathers == pytest.approx(seconds(4, halves=0), rel=1e-3)
    assert replicated.time(work(1.0, tokens=10)).gathers == pytest.approx(seconds(2, halves=1), rel=1e-3)


def test_a_node_receives_through_all_its_network_cards() -> None:
    cluster = Cluster(gpus=64, link=269e9, network=10e9, latency=1e-12)
    assert cluster.collective(8e9, 64) == pytest.approx(8e9 * 63 / 64 / 80e9)
    assert replace(cluster, gpus_per_node=1).collective(8e9, 64) == pytest.approx(8e9 * 63 / 64 / 10e9)
    # Faster cards than NVLink do not help.
    assert replace(cluster, network=1e12).collective(8e9, 64) == pytest.approx(8e9 * 63 / 64 / 269e9)


RATES = {"link": st.floats(1e10, 1e12), "network": st.floats(1e9, 1e12), "flops": st.floats(1e13, 1e15)}
clusters = st.builds(Cluster, gpus=st.sampled_from([8, 16, 64, 512]), **RATES)


@given(clusters, st.sampled_from(["8b", "32b", "qwen3-30b-a3b"]), st.sampled_from([1, 2, 4, 8]))
def test_faster_hardware_is_never_slower(cluster: Cluster, size: str, sharing: int) -> None:
    step = work(3e15, 2e15)
    before = on(cluster, size, sharing=sharing).time(step).total
    for name in ("link", "network", "flops"):
        better = replace(cluster, **{name: 2 * getattr(cluster, name)})
        assert on(better, size, sharing=sharing).time(step).total <= before * (1 + 1e-12)


@given(clusters, st.sampled_from([8, 16]))
def test_more_shards_take_less_memory(cluster: Cluster, shards: int) -> None:
    step = work(3e15)
    few = on(replace(cluster, gpus=16), shards=shards).memory(step)
    many = on(replace(cluster, gpus=512)).memory(step)
    # Gathered layers and activations are as many.
    kept = KEPT * on(cluster).parameters.total
    assert few - many == pytest.approx(kept / shards - kept / 512) and few > many > 0


def test_sharing_tokens_divides_work_and_activations() -> None:
    one, two = (on(Cluster(gpus=8), sharing=sharing) for sharing in (1, 2))
    step = work(3e15)
    assert two.time(step).balanced == one.time(step).balanced / 2
    assert one.time(step).exchanges == 0 < two.time(step).exchanges
    assert two.memory(step) - two.state_bytes < 0.7 * (one.memory(step) - one.state_bytes)


def test_micro_batches_gather_again() -> None:
    model = on(Cluster(gpus=64))
    one, four = (model.time(work(3e12, tokens=65_536, budget=budget)).gathers for budget in (65_536, 16_384))
    assert four > 3 * one


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Four groups; one has a trajectory longer than all the others together."""
    draw = np.random.default_rng(0)
    trunks = [draw.integers(1, 400, 50).tolist() for _ in range(4)]
    tails = [draw.integers(1, 400, 30 if row else 4000).tolist() for row in range(12)]
    records = [{"uid": str(row // 3), "input_ids": trunks[row // 3] + tail} for row, tail in enumerate(tails)]
    return write(tmp_path / "rows.jsonl", records)


def test_the_longest_trajectory_asks_for_shared_tokens(printed: Printed, rows: Path) -> None:
    out = printed("plan", rows, "--max-tokens", 8192, "--model", "tiny", "--ranks", 4, "--tflops", 1)
    lines = out.splitlines()
    assert "the longest trajectory" in lines[2] and "Would help: --sp 4 (" in out
    assert [line.split()[1] for line in lines[2:5]] == ["1", "2", "4"]


def test_one_micro_batch_asks_for_no_larger_budget_and_a_sweep_names_what_breaks(printed: Printed, rows: Path) -> None:
    given = ("plan", rows, "--max-tokens", 8192, "--model", "tiny", "--ranks", 64, "--prompts", 64)
    out = printed(*given)
    assert "tokens in 1 micro-batch; no layout" in out
    assert "Would help: more prompts in a step, or fsdp_size within a node (--shards)." in out
    assert "a larger --max-tokens" not in printed(*given, "--gpu-memory", 1, "--network", 0.1)
    out = printed(*given, "--cluster")
    assert [line.split()[0] for line in out.splitlines()[2:4]] == ["8", "64"]
    assert "First to break: FSDP's gathers, on 8 GPUs." in out


def test_what_alone_fits_is_advised_for_its_memory(printed: Printed, rows: Path) -> None:
    given = ("plan", rows, "--max-tokens", 200_000, "--model", "8b", "--ranks", 4, "--prompts", 1024)
    memory = [float(line.split()[9]) for line in printed(*given).splitlines()[2:4]]
    assert "Would help: --sp 2, which fits in memory (" in printed(*given, "--gpu-memory", sum(memory) / 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--sp", "3"], "--sp 3: expected a divisor of 8 GPUs and 4 heads"),
        (["--shards", "3"], "--shards 3: expected a divisor of 8 GPUs"),
        (["--ranks", "0"], "'--ranks': Input should be greater than or equal to 1, received 0"),
        (["--max-tokens", 10**23], "'--max-tokens': Input should be less than or equal to 2147483647"),
        (["--prompts", 10**12], "'--prompts': Input should be less than or equal to 1000000"),
        (["--tflops", "nan"], "'--tflops': Input should be greater than or equal to 1, received nan"),
    ],
)
def test_wrong_settings_are_named(refused: Refused, rows: Path, given: list[object], said: str) -> None:
    refused(said, "plan", rows, "--max-tokens", 64, "--model", "tiny", "--ranks", 8, *given)
    refused("--ranks needs --model, whose sizes decide the costs", "plan", rows, "--max-tokens", 64, "--ranks", 8)


def test_a_checkpoint_knows_the_seconds(printed: Printed, rows: Path, tmp_path: Path) -> None:
    """Updates on two GPUs that share tokens, a second for every 1e9 operations."""
    cost = MODEL_SIZES["tiny"].shape.cost
    fit = CostFit(cost)
    for tokens in range(1000, 9000, 1000):
        work = Work(forwards=1, tokens=tokens, pairs=300 * tokens, head_tokens=tokens)
        fit.add(work, cost.step(work.tokens, work.pairs, work.head_tokens) / 1e9)
    state = {"costs": fit.state(), "sharing_ranks": 2}
    folder = tmp_path / "global_step_3" / "actor"
    folder.mkdir(parents=True)
    (folder / "tree_engine_world_size_2_rank_0.json").write_text(json.dumps(state))
    out = printed("plan", rows, "--max-tokens", 8192, "--model", "tiny", "--ranks", 1, "--checkpoint", folder.parent)
    groups = [[row.token_ids for row in read_row_file(rows) if row.group == group] for group in "0123"]
    operations = sum(cost.forest(Forest.from_rows(group)) for group in groups)
    # Twice for one GPU instead of two; a pass for log-probs costs a quarter of an update.
    assert float(out.splitlines()[2].split()[3]) == pytest.approx(2 * 5 / 4 * operations / 1e9, abs=0.006)


@pytest.mark.parametrize("state", [{}, {"costs": None}, {"costs": {"equations": []}}, {"costs": {"equations": [[1]]}}])
def test_a_checkpoint_without_costs_is_named(refused: Refused, rows: Path, tmp_path: Path, state: object) -> None:
    (tmp_path / "tree_engine_world_size_2_rank_0.json").write_text(json.dumps(state))
    given = ("plan", rows, "--max-tokens", 64, "--model", "tiny", "--ranks", 8, "--checkpoint")
    for folder in (tmp_path, tmp_path / "elsewhere"):
        refused(f"--checkpoint {folder}: expected", *given, folder)
