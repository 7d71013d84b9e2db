"""`tree-rl plan --cluster` without rows: splits by hand and by search, times of a log, what the command prints."""

import json
from pathlib import Path

import pytest
from fixture_types import Printed, Refused
from hypothesis import given
from hypothesis import strategies as st
from record_files import write

from tree_rl.cost.cluster.split import StepLoad, fastest_split, seconds_in_turns


def test_a_split_by_hand() -> None:
    load = StepLoad(rollout=60.0, training=20.0, weights=1.0)
    split = fastest_split(load, 8)
    assert (split.rollout_gpus, split.training_gpus) == (6, 2)
    # Both sides work 10 s, and weights take one.
    assert split.step == 11 and split.gpu_seconds == 88
    assert split.rollout_idle == split.training_idle == pytest.approx(1 / 11)
    assert seconds_in_turns(load, 8) == 11
    # Five seconds of metrics make the trainer the slower side, unless it has more GPUs; in turns they cost nothing.
    with_metrics = StepLoad(rollout=60.0, training=20.0, weights=1.0, metrics=5.0)
    split = fastest_split(with_metrics, 8)
    assert (split.rollout_gpus, split.training_gpus, split.step) == (5, 3, 13)
    assert split.training_idle == pytest.approx(1 - 20 / 3 / 13) and seconds_in_turns(with_metrics, 8) == 11


seconds = st.floats(min_value=0.1, max_value=1e4)


@given(seconds, seconds, st.integers(2, 40), st.integers(1, 4), st.integers(1, 4))
def test_no_other_split_is_faster(rollout: float, training: float, gpus: int, server: int, sharing: int) -> None:
    load = StepLoad(rollout=rollout, training=training)
    allowed = [n for n in range(1, gpus) if n % server == 0 and (gpus - n) % sharing == 0]
    if not allowed:
        with pytest.raises(ValueError, match=f"^{gpus}: expected GPUs"):
            fastest_split(load, gpus, server_gpus=server, sharing=sharing)
        return
    split = fastest_split(load, gpus, server_gpus=server, sharing=sharing)
    assert split.rollout_gpus in allowed and split.rollout_gpus + split.training_gpus == gpus
    assert split.step == min(max(rollout / n, training / (gpus - n)) for n in allowed)
    assert min(split.rollout_idle, split.training_idle) == pytest.approx(0)
    # Taking turns wastes nothing, if work spreads over any number of GPUs.
    assert split.step >= seconds_in_turns(load, gpus) * (1 - 1e-12)


@pytest.mark.parametrize("field", ("rollout", "training", "weights", "metrics"))
@pytest.mark.parametrize("value", (-1.0, float("nan"), float("inf")))
def test_loads_that_cannot_be_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"StepLoad\.{field}: expected seconds"):
        StepLoad(**{"rollout": 1.0, "training": 1.0, field: value})


TIMES = {"step": 10.0, "gen": 6.0, "update_weights": 0.5, "save_checkpoint": 1.0, "update_actor": 1.5, "ref": 0.5}
STEP = {f"timing_s/{name}": seconds for name, seconds in TIMES.items()}
STEP |= {"perf/total_num_tokens": 1000.0, "perf/throughput": 25.0}
"""Four GPUs: 24 GPU-seconds of rollouts, 10 of training."""
TREES = {"tree/unique_tokens": 250.0, "tree/realised_saving": 0.75}


def log_of(folder: Path, *steps: dict[str, float]) -> Path:
    return write(folder / "metrics.jsonl", [{"step": number, "data": step} for number, step in enumerate(steps, 1)])


def test_a_run_on_trees_tells_both_arms_unless_it_computed_nothing(printed: Printed, tmp_path: Path) -> None:
    compiles = {**STEP, **TREES, "timing_s/step": 100.0, "timing_s/gen": 50.0, "perf/throughput": 2.5}
    log = log_of(tmp_path, compiles, {**STEP, **TREES}, {**STEP, **TREES})
    said = json.loads(printed("plan", log, "--ranks", 17, "--cluster", "--json"))
    trees, rows = said["trees"], said["rows"]
    # 24 / 12 = 10 / 5 = 2 s, and half a second for weights.
    assert (trees["rollout_gpus"], trees["training_gpus"], trees["seconds"]) == (12, 5, 2.5)
    assert trees["gpu_seconds"] == 17 * 2.5 and trees["rollout_idle"] == trees["training_idle"] == pytest.approx(0.2)
    assert trees["seconds_in_turns"] == 34 / 17 + 0.5
    # 2 s of passes over a quarter of the tokens: 6 s more on each of four GPUs make 34 GPU-seconds.
    assert (rows["rollout_gpus"], rows["training_gpus"]) == (7, 10)
    assert rows["seconds"] == pytest.approx(24 / 7 + 0.5)
    noted = "(steps: 2, GPUs: 4): 24.0 GPU-seconds of rollouts, 10.0 of training, 0.50 s for weights, 0.00 for metrics."
    assert noted in said["notes"][0]
    log = log_of(tmp_path, *[{**STEP, **TREES, "tree/metrics_seconds": 1.0}] * 2)
    said = json.loads(printed("plan", log, "--ranks", 17, "--cluster", "--json"))
    assert (said["trees"]["training_gpus"], said["trees"]["seconds"]) == (7, pytest.approx(10 / 7 + 1 + 0.5))
    log = log_of(tmp_path, *[{**STEP, **TREES, "tree/realised_saving": 1.0}] * 2)
    said = json.loads(printed("plan", log, "--ranks", 8, "--cluster", "--json"))
    assert said["trees"]["gpu_seconds"] and not said.get("rows")


def test_given_seconds_replace_measured_ones(printed: Printed, tmp_path: Path) -> None:
    log = log_of(tmp_path, {**STEP, **TREES})
    given = ("--rollout-seconds", 50, "--rows-seconds", 250)
    said = json.loads(printed("plan", log, "--ranks", 6, "--cluster", *given, "--json"))
    assert (said["trees"]["rollout_gpus"], said["trees"]["seconds"]) == (5, 10.5)
    assert (said["rows"]["rollout_gpus"], said["rows"]["seconds"]) == (1, 50.5)
    assert said["notes"][-1] == "Without trees a step takes 4.81 times the GPU-seconds."


def test_stock_verl_has_only_rows_and_without_a_log_the_options_are_enough(printed: Printed, tmp_path: Path) -> None:
    lines = printed("plan", log_of(tmp_path, STEP), "--ranks", 2, "--cluster").splitlines()
    assert lines[2].split() == ["rows", "1", "1", "24.50", "2%", "59%", "49.0", "17.50"] and lines[3] == ""
    out = printed("plan", "--ranks", 8, "--cluster", "--rollout-seconds", 60, "--training-seconds", 20)
    assert out.splitlines()[2].split() == ["trees", "6", "2", "10.00", "0%", "0%", "80.0", "10.00"]


def test_logs_that_cannot_tell_are_refused(refused: Refused, tmp_path: Path) -> None:
    stale = {**STEP, "training/off_policy/trajectory_staleness/max": 1.0}
    given = ("--ranks", 4, "--cluster")
    refused("take turns, found an asynchronous one", "plan", log_of(tmp_path, STEP, stale), *given)
    short = {name: value for name, value in STEP.items() if name != "perf/throughput"}
    expected = "expected steps with timing_s/step, timing_s/gen, perf/total_num_tokens"
    refused(expected, "plan", log_of(tmp_path, short), *given)
