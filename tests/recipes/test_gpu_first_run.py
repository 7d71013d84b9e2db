"""The first run on a GPU: what is missing is said at once, what it shows is held beside what a healthy run shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from finished_run import run
from gpu_first_run.after import lines
from gpu_first_run.before import missing
from record_files import write

from tree_rl.inspection.files.run_log import read_run

FOLDER = Path(__file__).parents[2] / "recipes" / "gpu_first_run"
NUMBER = re.compile(r"\d[\d.e+-]*")
HEALTHY = {"tree/por": 0.5, "tree/realised_saving": 0.48, "tree/self_check_error": 0.013}
HEALTHY |= {"rollout_corr/log_ppl_abs_diff": 0.004, "timing_s/step": 4.0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what a machine without a GPU lacks")
def test_a_machine_without_a_gpu_is_told_so(tmp_path: Path) -> None:
    gpu, model = missing(device="gpu", rollout="hf", model=str(tmp_path))
    assert gpu.startswith(f"torch {torch.__version__} ") and ("no CUDA" in gpu or "no GPU" in gpu)
    assert model == f"MODEL={tmp_path}: expected the folder of a Hugging Face model, found no config.json in it"


def test_the_script_ends_at_once_if_something_is_missing_and_a_cpu_needs_nothing(tmp_path: Path) -> None:
    assert not list(missing(device="cpu", rollout="hf", model=""))
    given = {"DEVICE": "cpu", "MODEL": "nowhere", "PYTHON": sys.executable, "OUTPUT": str(tmp_path / "out")}
    done = subprocess.run(["bash", FOLDER / "run.sh"], env=os.environ | given, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr.startswith("gpu_first_run: MODEL=nowhere: expected the folder")


@pytest.mark.parametrize(
    ("changed", "attention", "seconds", "broken"),
    [
        ({}, "fa4", 200.0, []),
        ({"tree/por": 0.1}, "fa4", 200.0, ["overlap (POR)"]),
        ({"tree/self_check_error": 0.2}, "fa4", 200.0, ["log-probs, trees against rows"]),
        ({"rollout_corr/log_ppl_abs_diff": 0.2}, "fa4", 200.0, ["log-probs, rollout against update"]),
        ({"tree/realised_saving": None}, "fa4", 200.0, ["tokens that updates left out"]),
        ({}, "sdpa", 601.0, ["attention", "seconds of the whole run"]),
    ],
)
def test_each_expectation_can_fail(
    changed: dict[str, float | None], attention: str, seconds: float, broken: list[str], tmp_path: Path
) -> None:
    figures = {name: value for name, value in (HEALTHY | changed).items() if value is not None}
    log = read_run(write(tmp_path / "metrics.jsonl", [{"step": step, "data": figures} for step in (1, 2)]))
    found = list(lines(log, f"(actor pid=7) attention: {attention}\n", device="gpu", seconds=seconds))
    assert [line.name for line in found if not line.holds] == broken
    of_real = list(lines(log, f"attention: {attention}", device="gpu", seconds=seconds, model="Qwen3-0.6B"))
    assert [line.name for line in of_real if not line.holds] == [one for one in broken if "against rows" not in one]
    if "attention" in broken:
        (line,) = [str(one).split() for one in found if one.name == "attention"]
        assert line == ["NOT", "attention", "expected", "fa4", "or", "triton", "or", "flex", "got", "sdpa"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_script_runs_on_a_cpu(tmp_path: Path) -> None:
    sizes = {"STEPS": "2", "TRAIN_BATCH_SIZE": "4"}
    printed = run(["bash", FOLDER / "run.sh"], tmp_path, DEVICE="cpu", OUTPUT=str(tmp_path / "out"), **sizes)
    shown = (FOLDER / "README.md").read_text(encoding="utf-8").split("```\n")[-2]
    assert NUMBER.sub("", shown) == NUMBER.sub("", printed.partition("lengths and rounding.\n")[2])
    assert shown.count("ok   ") == 6
