"""The attention benchmark runs where it is, writes what it ran, and times nothing that is wrong."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "kernels" / "attention"

QUESTIONS = """
import dataclasses, sys
sys.path.insert(0, sys.argv[1])
import torch
from contenders import DEFAULT, contenders_named, pairs_of_rows, tree_contender
from gate import GateError, check
from plan import registry
from shapes import HEAD_LAYOUTS, grpo, stubs
from tree_kernels import tree_attention

cpu, heads = torch.device("cpu"), HEAD_LAYOUTS["tiny"]
right = tree_contender("sdpa", grpo(300).forest(), cpu)
print(check(right, heads, torch.float32).largest < 1e-5)
everything = torch.full_like(right.subtree_end, 300)
wrong = dataclasses.replace(right, run=lambda q, k, v: tree_attention(q, k, v, everything, impl="sdpa"))
try:
    check(wrong, heads, torch.float32)
except GateError as error:
    print("refused:", error)

forest = stubs(4_000).forest()
(whole,) = contenders_named("paths fa4", forest, cpu)
(gated,) = contenders_named("paths fa4", forest, cpu, most_tokens=4_000)
print(whole.tokens == forest.num_flat, whole.scale == 1.0, gated.tokens <= 4_000)
print(round(gated.pairs * gated.scale) == pairs_of_rows(forest.row_index.lengths))

cases = registry(shapes=None, heads=None, tokens=None)
print(len(cases) == len(set(cases)) == 240, min(c.tokens for c in cases), max(c.tokens for c in cases))
print(*DEFAULT["cuda"], sep=",")
"""


def run(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, timeout=200).stdout


def test_every_timing_has_passed_the_gate_and_says_what_it_is(tmp_path: Path) -> None:
    table = tmp_path / "attention.csv"
    arguments = ["--heads", "tiny", "--tokens", "200", "--shapes", "grpo", "recorded call", "--group-seconds", "0.001"]
    contenders = ["--contenders", "tree sdpa", "paths sdpa", "causal sdpa", "paths cudnn"]
    output = run(str(BENCHMARK), "--device", "cpu", *arguments, *contenders, "--commit", "test", "--out", str(table))
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["shape"]]
    assert len(rows) == 2 * 5 and {row["commit"] for row in rows} == {"test"}
    ran = [row for row in rows if not row["not_run"]]
    assert len(ran) == 2 * 4
    for row in ran:
        assert float(row["gate_error"]) < 1e-5
        assert 0 < float(row["total_ms_low"]) <= float(row["total_ms"]) <= float(row["total_ms_high"])
        assert float(row["total_tflops"]) > 0
    assert output.count("needs a CUDA device") == 1
    assert "3.00" in output  # what the rows of a GRPO group with a quarter as prompt cost over their tree


SHAPES = {"causal", "chains", "grpo", "stubs", "binary", "tiny", "recorded trial", "recorded call"}


def test_the_registry_runs_small_on_a_cpu(tmp_path: Path) -> None:
    table = tmp_path / "registry.csv"
    arguments = ["--every", "--group-seconds", "0.0001", "--commit", "test", "--out", str(table)]
    run(str(BENCHMARK), "--device", "cpu", *arguments, "--tokens", "130", "--heads", "tiny")
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["shape"]]
    contenders = {"tree sdpa", "paths sdpa", "causal sdpa, equal tokens", "causal sdpa, equal operations"}
    cases = {("tiny", shape, contender) for shape in SHAPES for contender in contenders}
    assert {(row["heads"], row["shape"], row["contender"]) for row in rows} == cases and len(rows) == len(cases)
    assert all(float(row["gate_error"]) < 1e-5 and float(row["total_ms"]) > 0 for row in rows)


@pytest.fixture(scope="module")
def answers() -> list[str]:
    """Of one interpreter, whose modules are named as other packages are."""
    return run("-c", QUESTIONS, str(BENCHMARK)).splitlines()


def test_a_wrong_mask_does_not_pass_the_gate(answers: list[str]) -> None:
    assert answers[0] == "True"
    assert answers[1].startswith("refused: tree sdpa: expected errors of at most 1e-05")


def test_the_gate_of_rows_is_no_larger_than_that_of_their_tree(answers: list[str]) -> None:
    assert answers[2:4] == ["True True True", "True"]


def test_the_registry_spans_8k_to_128k_and_every_baseline(answers: list[str]) -> None:
    assert answers[4] == "True 8192 131072"
    assert answers[5].split(",") == [
        *("tree fa4", "tree triton", "tree flex"),
        *("paths fa4", "paths cudnn", "paths fa2", "causal fa4"),
    ]
