"""The benchmarks of the kernels run where they are, say what they ran, and time nothing that is wrong."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "kernels"

WRONG = """
import dataclasses, sys
sys.path.insert(0, sys.argv[1])
import torch
import attention
from forest_shapes import SHAPES
from gated_delta_rule import DeltaRule
from kernel_runs import GateError
from tree_kernels import tree_attention

cpu = torch.device("cpu")
heads = attention.SIZES["tiny"]
(right,) = attention.contenders_named("tree sdpa", SHAPES["grpo"](300).forest(), cpu)
everything = torch.full_like(right.subtree_end, 300)
wrong = dataclasses.replace(right, run=lambda q, k, v: tree_attention(q, k, v, everything, impl="sdpa"))
assert attention.check(right, heads, torch.float32) < 1e-5
try:
    attention.check(wrong, heads, torch.float32)
except GateError as error:
    print("refused:", error)

forest = SHAPES["stubs"](4_000).forest()
(gated,) = attention.contenders_named("paths fa4", forest, cpu, most_tokens=4_000)
assert gated.tokens <= 4_000
assert round(gated.pairs * gated.scale) == attention.pairs_of_rows(forest.row_index.lengths)

forest, rule = SHAPES["grpo"](200).forest(), DeltaRule(DeltaRule.heads_of["tiny"], torch.float32, cpu)
right, truth = (rule.contender(f"tree {impl}", forest) for impl in ("chunked", "reference"))
for name in ("tree chunked", "rows chunked"):
    assert rule.gate_error(rule.contender(name, forest), truth, forest.num_unique) < 1e-5
wrong = dataclasses.replace(right, run=rule.contender("linear chunked", forest).run)
try:
    rule.gate_error(wrong, truth, forest.num_unique)
except GateError as error:
    print("refused:", error)
"""


def run(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, timeout=200).stdout


@pytest.mark.parametrize(
    ("script", "shapes", "contenders", "missing", "error"),
    [
        ("attention.py", ["grpo", "recorded call"], ["tree sdpa", "paths sdpa", "causal sdpa"], "paths cudnn", 1e-5),
        pytest.param(
            *("gated_delta_rule.py", ["grpo", "tiny"], ["tree chunked", "rows chunked"], "linear fla", 2e-6),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("state_space.py", ["grpo", "tiny"], ["tree chunked", "linear chunked"], "linear mamba_ssm", 2e-6),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_timing_has_passed_the_gate_and_says_what_it_is(
    script: str, shapes: list[str], contenders: list[str], missing: str, error: float, tmp_path: Path
) -> None:
    table = tmp_path / "times.csv"
    sizes = ["--device", "cpu", "--tokens", "200", "--heads", "tiny", "--group-seconds", "0.001", "--commit", "test"]
    chosen = ["--shapes", *shapes, "--contenders", *contenders, missing, "--out", str(table)]
    output = run(str(FOLDER / script), *sizes, *chosen)
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["shape"]]
    ran = [row for row in rows if not row["not_run"]]
    assert {row["shape"] for row in ran} == set(shapes) and {row["commit"] for row in ran} == {"test"}
    assert len({row["contender"] for row in ran}) >= len(contenders) and len(rows) - len(ran) == len(shapes)
    for row in ran:
        assert float(row["gate_error"]) < error
        assert 0 < float(row["total_ms_low"]) <= float(row["total_ms"]) <= float(row["total_ms_high"])
    assert output.count("needs a CUDA device") == len(shapes)


def test_wrong_masks_and_wrong_paths_do_not_pass_the_gates() -> None:
    mask, paths = run("-c", WRONG, str(FOLDER)).splitlines()
    assert mask.startswith("refused: tree sdpa: expected errors of at most 1e-05")
    assert paths.startswith("refused: tree chunked: expected errors of at most 2e-06")
