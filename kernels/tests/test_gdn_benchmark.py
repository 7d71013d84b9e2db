"""The benchmark of the gated delta rule runs where it is, says what it ran, and times nothing that is wrong."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "kernels" / "gated_delta_rule.py"

WRONG_TREE = """
import dataclasses, sys
sys.path.insert(0, sys.argv[1])
import torch
from gated_delta_rule import HEADS, GateError, contender, gate_error
from shapes import SHAPES

cpu, heads = torch.device("cpu"), HEADS["tiny"]
forest = SHAPES["grpo"](200).forest()
right, truth = (contender(f"tree {impl}", forest, cpu) for impl in ("chunked", "reference"))
print(gate_error(right, truth, forest, heads, torch.float32, cpu) < 1e-5)
print(gate_error(contender("rows chunked", forest, cpu), truth, forest, heads, torch.float32, cpu) < 1e-5)
wrong = dataclasses.replace(right, run=contender("linear chunked", forest, cpu).run)
try:
    gate_error(wrong, truth, forest, heads, torch.float32, cpu)
except GateError as error:
    print("refused:", error)
"""


def run(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, timeout=200).stdout


def test_every_timing_has_passed_the_gate_and_says_what_it_is(tmp_path: Path) -> None:
    table = tmp_path / "gdn.csv"
    arguments = ["--tokens", "90", "--heads", "tiny", "--group-seconds", "0.001", "--commit", "test"]
    output = run(str(BENCHMARK), "--device", "cpu", *arguments, "--out", str(table))
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["shape"] for row in rows[::5]] == ["grpo", "stubs", "tiny", "chains", "causal"]
    assert {(row["commit"], row["dtype"], row["heads"]) for row in rows} == {("test", "float32", "tiny")}
    assert {row["torch"] for row in rows} != {""} and "flash_linear_attention" in rows[0]
    ran = [row for row in rows if not row["not_run"]]
    assert {row["contender"] for row in ran} == {"tree chunked", "linear chunked", "rows chunked"}
    for row in ran:
        assert float(row["gate_error"]) < 2e-6
        assert 0 < float(row["total_ms_low"]) <= float(row["total_ms"]) <= float(row["total_ms_high"])
    measured = {(row["shape"], row["contender"]): int(row["measured_tokens"]) for row in ran}
    assert measured["grpo", "tree chunked"] == measured["grpo", "linear chunked"] < measured["grpo", "rows chunked"]
    assert output.count("flash-linear-attention needs a CUDA device") == 10


def test_a_recurrence_along_the_wrong_paths_does_not_pass_the_gate() -> None:
    tree, rows, wrong = run("-c", WRONG_TREE, str(BENCHMARK.parent)).splitlines()
    assert (tree, rows) == ("True", "True")
    assert wrong.startswith("refused: tree chunked: expected errors of at most 2e-06")


@pytest.mark.slow
def test_the_plans_of_every_forest_are_timed() -> None:
    command = [sys.executable, str(BENCHMARK.with_name("recurrence_plans.py")), "--repeats", "1", "--device", "cpu"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 2 + 12
    assert all(float(line.split()[-1]) >= float(line.split()[-2]) > 0 for line in lines[2:])
