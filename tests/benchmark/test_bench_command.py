"""`tree-rl bench` on a tiny model: real updates, the gate passed, a table, a CSV and a figure. Times are not judged."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from record_files import write
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from tree_rl.benchmark.against_packed import packed_updates
from tree_rl.benchmark.against_packed.profiled_update import time_by_class
from tree_rl.benchmark.batch import Batch, agent_batch, recorded_batches
from tree_rl.benchmark.bench_options import BenchOptions
from tree_rl.benchmark.comparison import Comparison
from tree_rl.benchmark.phases import PHASES
from tree_rl.benchmark.results import read_csv
from tree_rl.cli import app
from tree_rl.cost import ModelShape
from tree_rl.cost.cluster.parameters import Parameters
from tree_rl.cost.model_sizes import MODEL_SIZES
from tree_rl.inspection.files import InputError
from tree_rl.inspection.row import Row

TINY = ["bench", "--model", "tiny", "--layers", "1", "--num-rows", "8", "--commit", "test"]


def bench(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*TINY, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_updates_are_timed_and_written_with_their_provenance(tmp_path: Path) -> None:
    given = ("--row-tokens", "96", "--por", "0", "--por", "0.6", "--repeats", "2", "--out", str(tmp_path))
    output = bench(*given, "--trace")
    rows = read_csv(tmp_path / "update_tiny_agents.csv")
    assert [float(row["por"]) for row in rows] == pytest.approx([0.0, 0.6], abs=0.01)
    for row in rows:
        assert float(row["tree_gradient_error"]) < 1e-5
        low, median, high = (float(row[name]) for name in ("speed_up_low", "speed_up", "speed_up_high"))
        assert min(low, median) > 0 and low <= high
        for side in ("tree", "packed"):
            assert all(float(row[f"{side}_{name}_s"]) >= 0 for name in PHASES)
        assert (row["commit"], row["tree_attention"], row["packed_attention"]) == ("test", "sdpa", "sdpa")
    assert float(rows[0]["flop_bound"]) == pytest.approx(1.0, abs=0.01)
    assert 1.5 < float(rows[1]["flop_bound"]) < float(rows[1]["token_bound"]) == pytest.approx(2.5, rel=0.02)
    assert output.count("waits inside layers 0") == output.count("longest kernels") == 4
    assert {row["layer_kernels"] for row in rows} == {"transformers"} and "liger_kernel" in rows[0]
    assert (tmp_path / "update_tiny_agents.png").stat().st_size > 5_000


ON_A_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--model 70b", "--model 70b: expected one of tiny, 0.6b, 8b, 32b"),
        ("--dtype float8", "--dtype float8: expected one of bfloat16, float16, float32"),
        ("--por 0.5 --por 0.95", "--por 0.95: expected at least 0 and below 0.875 with 8 rows in a group"),
        ("--por nan", "--por nan: expected"),
        ("--por 0.5 --num-rows 1", "--por 0.5: expected 0 with 1 row in a group"),
        ("--learning-rate 1e-5", "--learning-rate: expected it together with --steps"),
        ("--rows call", "--rows: expected it together with --data"),
        ("--tree-attention \x1b[31m", "--tree-attention \\x1b[31m: expected one of auto, "),
        ("--packed-attention none", "--packed-attention none: expected one of auto, "),
        ("--packed-attention cudnn --dtype float32", "--packed-attention cudnn: it needs"),
        pytest.param("--liger", "leave it out", marks=ON_A_CPU),
        # These are found once the model is there.
        ("--row-tokens 64 --por 0.5 --max-tokens 100", "--max-tokens 100: expected at least 255, the unique tokens of"),
        ("--row-tokens 64 --por 0.5 --trained-share 0", "expected a trained token"),
        ("--data recorded.jsonl", "token ids below its vocabulary of 512, recorded has 900"),
    ],
)
def test_mistakes_end_in_one_line(given: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "recorded.jsonl", [{"input_ids": ids, "uid": "a"} for ids in ([1, 2, 900], [1, 3])])
    result = CliRunner().invoke(app, [*TINY, *given.split()])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and said in result.stderr
    begins = any(option in given for option in ("--max-tokens", "--trained-share", "--data "))
    assert ("model qwen3-tiny" in result.output) == begins and "nan" not in result.stdout


def test_on_a_gpu_a_model_that_liger_lacks_runs_its_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BenchOptions, "device", torch.device("cuda"))
    chosen = {}
    for name, size in MODEL_SIZES.items():
        given = dict.fromkeys(BenchOptions.__dataclass_fields__) | {"model": name, "tree_attention": "auto", "pors": ()}
        setting = BenchOptions(**given).setting()  # type: ignore[arg-type]
        assert setting["model"] == f"qwen3-{name}" or name == setting["model"]
        chosen[size.config["model_type"]] = setting["layer_kernels"]
    assert chosen.pop("qwen3") == chosen.pop("qwen3_moe") == chosen.pop("qwen3_5_text") == "liger"
    assert set(chosen.values()) == {"transformers"} and len(chosen) >= 3


@pytest.mark.parametrize(
    "model, layers", (("tiny-qwen3.5", "4"), ("tiny-a3b", "1"), ("tiny-v2-lite", "2"), ("tiny-nemotron-h", "3"))
)
def test_hybrid_and_sparse_models_are_updated(tmp_path: Path, model: str, layers: str) -> None:
    sizes = ["--row-tokens", "64", "--por", "0.6", "--repeats", "1", "--out", str(tmp_path)]
    bench("--model", model, "--layers", layers, *sizes)
    (row,) = read_csv(tmp_path / f"update_{model}_agents.csv")
    assert float(row["tree_gradient_error"]) < 1e-5
    assert row["layers"] == layers and row["model"].endswith(model)
    ran = ("chunked", "tree kernels, rows apart") if model in ("tiny-qwen3.5", "tiny-nemotron-h") else ("", "")
    assert (row["tree_linear_attention"], row["packed_linear_attention"]) == ran


PUBLISHED = {"qwen3.5-4b": 4.2, "qwen3-30b-a3b": 30.5, "8b": 8.2, "deepseek-v2-lite": 15.7}
PUBLISHED |= {"glm-4.7-flash": 29.9, "nemotron-h-8b": 8.1}


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_sizes_are_the_published_ones(name: str, billions: float) -> None:
    size = MODEL_SIZES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**size.config))
    counted = sum(p.numel() for p in model.parameters())
    assert round(counted / 1e9, 1) == billions
    # What `plan` counts.
    assert Parameters.of(size.shape, size.config).total == pytest.approx(counted, rel=2e-3)
    assert ModelShape.from_config(model.config.to_dict()) == size.shape
    fewer = size.with_layers(size.shape.layers // 2)
    share = (size.shape.layers // 2) / size.shape.layers
    assert fewer.shape.cost.per_pair == pytest.approx(size.shape.cost.per_pair * share)
    assert ModelShape.from_config(AutoConfig.for_model(**fewer.config).to_dict()) == fewer.shape


def test_a_recording_is_timed_group_by_overlap(tmp_path: Path) -> None:
    shared, split = list(range(40)), [[1, 2], [3, 4]]
    records = [{"uid": "near", "input_ids": shared + tail * 5} for tail in split]
    records += [{"uid": "far", "input_ids": [7, tail[0]] * 20} for tail in split]
    data = write(tmp_path / "recorded.jsonl", records)
    given = ["--data", str(data), "--row-tokens", "2", "--repeats", "1", "--out", str(tmp_path)]
    bench(*given, "--por", "0.45")
    (row,) = read_csv(tmp_path / "update_tiny_recorded.csv")
    assert (row["rows"], row["flat_tokens"], row["unique_tokens"]) == ("2", "100", "60")
    bench(*given)
    rows = read_csv(tmp_path / "update_tiny_recorded.csv")
    assert sorted(row["unique_tokens"] for row in rows) == ["60", "79"], "each group once, whatever overlaps are drawn"


def test_a_recording_makes_batches_that_share_no_group() -> None:
    ids = [np.arange(10) + n // 4 for n in range(12)]
    rows = [Row(name="row", group=f"task {n // 2}", token_ids=one, trained=None) for n, one in enumerate(ids)]
    batches = recorded_batches(rows, name="airline", por=0.5, flat_tokens=30, max_tokens=100, count=9)
    assert [len(batch.rows) for batch in batches] == [4, 4, 4]
    assert sorted(group for batch in batches for group in batch.groups) == sorted(row.group for row in rows)
    assert not any(trained[0] for batch in batches for trained in batch.trained)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_training_runs_stay_together_as_packed_rows_and_exact_ones_do(dtype: str, tmp_path: Path) -> None:
    bench("--row-tokens", "64", "--por", "0.5", "--steps", "3", "--dtype", dtype, "--out", str(tmp_path))
    curves = read_csv(tmp_path / "deviation_tiny_agents.csv")
    found = [(row["step"], row["dtype"], row["learning_rate"]) for row in curves]
    assert found == [(step, dtype, "0.0001") for step in "012"]
    columns = {name: [float(row[name]) for row in curves] for name in curves[0] if name.startswith(("loss", "grad"))}
    assert columns["loss_tree"][0] > 5 and columns["loss_tree"] != columns["loss_tree"][::-1]
    if dtype == "float32":
        assert max(columns["loss_tree_to_exact"]) < 1e-5
        for name in ("gradient_tree_to_exact", "gradient_reordered_to_packed"):
            assert min(columns[name]) > 0 and max(columns[name]) < 1e-5
    else:
        largest = {name: max(columns[f"gradient_{name}_to_exact"]) for name in ("tree", "packed")}
        assert 1e-4 < largest["tree"] < 1.5 * largest["packed"] < 0.1


def test_a_run_that_stops_leaves_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = packed_updates.compare

    def stops(model: Any, optimizer: Any, batch: Batch, *rest: Any, **more: Any) -> Comparison:
        if batch.overlap().por > 0.7:
            raise InputError("no more")
        return compare(model, optimizer, batch, *rest, **more)

    monkeypatch.setattr(packed_updates, "compare", stops)
    arguments = ["--row-tokens", "64", "--por", "0.5", "--por", "0.8", "--repeats", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*TINY, *arguments])
    assert result.exit_code == 2 and "no more" in result.output and "POR 0.5, 1 of 2" in result.output
    (row,) = read_csv(tmp_path / "update_tiny_agents.csv")
    assert float(row["por"]) == pytest.approx(0.5, abs=0.01)


def test_the_gate_of_sparse_rows_trains_a_token() -> None:
    sparse = agent_batch(por=0.5, trained_share=0.01, num_rows=8, row_tokens=16_384, num_groups=1, vocab=512)
    thinned = sparse.for_gate()
    short = agent_batch(por=0, trained_share=1, num_rows=5000, row_tokens=4, num_groups=1, vocab=512)
    assert short.for_gate().num_trained == short.num_trained
    assert 0 < thinned.num_trained < sparse.num_trained and thinned.overlap().por == pytest.approx(0.5, abs=0.05)


def test_classes_add_up_and_the_longest_comes_first() -> None:
    lines = time_by_class([("nvjet_a", 0.3, 2), ("nvjet_b", 0.3, 1), ("Memset (Device)", 0.2, 4)])
    expected = ["600.0 ms 75.0% 3 x matrix product", "200.0 ms 25.0% 4 x fill"]
    assert [" ".join(line.split()) for line in lines] == expected
