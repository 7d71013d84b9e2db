"""Whole steps of two arms: the same work in both, parts that add up, and what Amdahl's law makes of an update."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import whole_step
from record_files import write
from scripted_steps.session_scripts import Script, play_session, script_with_overlap
from scripted_steps.step_parts import PARTS, UPDATE, amdahl, step_rows, summary

from tree_rl.benchmark.results import read_csv
from tree_rl.rollout.transcript import ModelCall, rows_of_calls
from tree_rl.tree import Forest

ROOT = Path(__file__).parents[2]
VOCAB = 150_000


def played(script: Script, group: int, session: int) -> list[list[int]]:
    """Token ids of a session's rows, with drawn replies."""
    draw = np.random.default_rng((group, session, 99))
    made = []

    async def ask(context: list[int], wanted: int) -> list[int]:
        reply = draw.integers(0, VOCAB, wanted).tolist()
        made.append(ModelCall(prompt_ids=tuple(context), response_ids=tuple(reply), log_probs=None))
        return reply

    asyncio.run(play_session(script.groups[group][session], (group, session), ask, vocab=VOCAB))
    return [list(row.token_ids) for row in rows_of_calls(made)]


@pytest.mark.parametrize("por", [0.5, 0.9])
def test_sessions_that_follow_the_script_have_its_rows_and_its_overlap(por: float) -> None:
    script = script_with_overlap(por, groups=3, sessions=2)
    assert script.por == pytest.approx(por, abs=0.06)
    rows = {place: played(script, *place) for place in np.ndindex(3, 2)}
    for (group, session), of_session in rows.items():
        assert sorted(map(len, of_session)) == sorted(script.groups[group][session].row_tokens())
    every = [np.array(row) for of_session in rows.values() for row in of_session]
    keys = [str(group) for (group, _), of_session in rows.items() for _ in of_session]
    forest = Forest.from_rows(every, merge_key=keys)
    assert (len(every), forest.num_flat, forest.num_unique) == (script.rows, script.flat_tokens, script.unique_tokens)
    assert max(len(row) for row in every) <= script.longest_prompt + script.longest_response


def test_sessions_of_one_turn_share_their_prompt_alone() -> None:
    arguments = whole_step.parse(["--single-turn", "40", "20", "--prompts", "3", "--sessions", "4"])
    assert arguments.por == [0.5], "a row of 60 tokens shares 40 with three others"
    script = script_with_overlap(**whole_step.script_arguments(arguments, 0.5))
    assert (script.rows, script.flat_tokens, script.generated_tokens) == (12, 720, 240)
    assert (script.longest_prompt, script.longest_response) == (40, 20)
    rows = [row for place in np.ndindex(3, 4) for row in played(script, *place)]
    forest = Forest.from_rows([np.array(row) for row in rows], merge_key=[str(row // 4) for row in range(12)])
    assert forest.num_unique == script.unique_tokens == 3 * (40 + 4 * 20)


def write_run(folder: Path) -> None:
    """Three steps of ten seconds, as a run would leave them."""
    (folder / "stamps").mkdir(parents=True)
    lines, metrics, looks = [], [], []
    for step in (1, 2, 3):
        begin = 10.0 * step
        lines += [{"step": step, "started": begin + late} for late in (0, 1)]
        lines += [{"step": step, "ended": begin + 3, "generated": 20} for _ in range(2)]
        lines.append({"step": step, "asked": begin + 0.5, "taken": begin + 4, "rows": 5, "flat_tokens": 70})
        timers = {"gen": 3.75, "old_log_prob": 1.0, "update_actor": 2.0, "update_weights": 0.5}
        metrics.append({"step": step, "data": {f"timing_s/{name}": value for name, value in timers.items()}})
        for second in range(10):
            looks.append({"time": begin + second, "idle": [second / 9, 0.25], "memory_gib": second + step})
    half = len(lines) // 2
    for number, part in enumerate((lines[:half], lines[half:])):
        write(folder / "stamps" / f"{number}.jsonl", part)
    write(folder / "metrics.jsonl", metrics)
    write(folder / "gpus.jsonl", looks)


def test_the_parts_of_a_step_are_its_seconds_and_amdahl_shortens_the_update_alone(tmp_path: Path) -> None:
    write_run(tmp_path)
    rows = step_rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 2], "nobody saw the end of the last step"
    expected = {"rollout_s": 3.0, "waiting_s": 1.0, "old_log_probs_s": 1.0, "ref_s": 0.0, "update_s": 2.0}
    expected |= {"weights_s": 0.75, "rest_s": 2.25, "step_s": 10.0}
    assert {name: rows[0][name] for name in expected} == pytest.approx(expected)
    assert sum(rows[1][name] for name in PARTS) == pytest.approx(rows[1]["step_s"])
    assert (rows[0]["rows"], rows[0]["flat_tokens"], rows[0]["generated_tokens"]) == (5, 70, 40)
    assert (rows[1]["gpu_idle_share"], rows[1]["gpu_memory_gib"]) == (pytest.approx(0.375), 11)
    assert rows[1]["gpus_idle"] == "0.500 0.250"
    apart = step_rows(tmp_path, apart=True)[1]
    assert (apart["waiting_s"], apart["rollout_s"]) == (3.5, 3.0)
    assert sum(apart[name] for name in PARTS[1:]) == pytest.approx(apart["step_s"]), "rollouts run beside the rest"
    with pytest.raises(ValueError, match="--steps"):
        summary([])
    (tmp_path / "gpus.jsonl").unlink()
    stock = summary(step_rows(tmp_path))
    assert sum(stock[name] for name in UPDATE) == pytest.approx(3.0)
    assert amdahl(stock, 1.0) == pytest.approx(1.0)
    assert amdahl(stock, 2.0) == pytest.approx(10 / 8.5)
    assert stock["gpu_idle_share"] == "", "a CPU reports none"
    # A run is ended when the last step is written and the next has begun.
    assert [whole_step.is_whole(tmp_path, step) for step in (1, 2, 3)] == [True, True, False]
    write(tmp_path / "stamps" / "2.jsonl", [{"step": 2, "started": 22.0}])
    assert not whole_step.is_whole(tmp_path, 2), "a session has not ended"
    write(tmp_path / "stamps" / "3.jsonl", [{"step": 2, "ended": 23.0}])
    assert whole_step.is_whole(tmp_path, 2)
    (tmp_path / "metrics.jsonl").unlink()
    assert not whole_step.is_whole(tmp_path, 2)


def test_gpus_are_the_first_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [whole_step.gpu_numbers(gpus) for gpus in (0, 2)] == [[], [0, 1]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert whole_step.gpu_numbers(1) == [2]


def test_an_arm_that_did_other_work_is_refused_and_vllm_alone_is_reported_beside_the_arms(tmp_path: Path) -> None:
    given = ["--output", str(tmp_path), "--csv", str(tmp_path / "t.csv"), "--por", "0.5", "--commit", "x"]
    arguments = whole_step.parse([*given, "--prompts", "1", "--sessions", "1", "--warm-up", "0"])
    write_run(tmp_path / "verl_0.5")
    with pytest.raises(ValueError, match=r"verl_0.5, step 1: expected .*rows"):
        whole_step.report(arguments, {"stock_attention": ""})
    arguments = whole_step.parse([*given, "--warm-up", "1"])
    assert whole_step.alone_per_second(arguments, 0.5, 0.0) is None
    (tmp_path / "vllm_0.5").mkdir()
    rounds = [{"rollout_s": seconds, "generated_tokens": 60, "tool_seconds": 0.0} for seconds in (30, 2, 3, 4)]
    write(tmp_path / "vllm_0.5" / "rounds.jsonl", rounds)
    assert whole_step.alone_per_second(arguments, 0.5, 0.0) == 20, "the first round warms up"
    assert whole_step.alone_per_second(arguments, 0.5, 1.0) is None


def test_a_trainer_without_a_gpu_and_more_latencies_than_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert whole_step.parse(["--gpus", "0", "--apart", "1"]).unmeasured == 2
    with pytest.raises(SystemExit):
        whole_step.parse(["--tool-seconds", "0", "0.5", "10", "--steps", "2"])
    assert "--tool-seconds 0 0.5 10: expected no more of them than --steps 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        whole_step.parse(["--tool-seconds", "0", "10", "--gpus", "2", "--apart", "1"])
    assert "--tool-seconds 0 10: expected one with --apart" in capsys.readouterr().err
    for gpus in ("1", "2"):
        with pytest.raises(SystemExit):
            whole_step.parse(["--gpus", gpus, "--apart", "2"])
        assert f"--apart 2: expected fewer GPUs than --gpus {gpus}, for the trainer" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("apart", [0, 1])
def test_both_arms_do_the_same_work_and_their_tables_add_up(tmp_path: Path, apart: int) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "whole_step.py"), "--output", str(tmp_path)]
    command += ["--csv", str(tmp_path / "table.csv"), "--commit", "test", "--gpus", "0", "--model", "tiny"]
    command += ["--por", "0.7", "--prompts", "2", "--sessions", "2", "--scale", "0.05", "--turns", "4", "--steps", "2"]
    command += ["--warm-up-turns", "2", "--update-ratio", "0.7=2", "--apart", str(apart)]
    command += ["--tool-seconds", "0", *["5"] * (not apart)]
    shell = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=shell, cwd=tmp_path, capture_output=True, text=True, timeout=1100)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    stock, tree, *with_slow_tools = read_csv(tmp_path / "table.csv")
    assert (stock["arm"], tree["arm"]) == ("verl", "tree_rl")
    assert [line["tool_seconds"] for line in (stock, tree)] == ["0", "0"]
    assert [line["tool_seconds"] for line in with_slow_tools] == ["5", "5"] * (not apart)
    assert all(float(line["rollout_s"]) > 3 * 5 for line in with_slow_tools), "four turns wait for three tools"
    assert (stock["stock_attention"], stock["commit"]) == ("row by row, SDPA", "test")
    for count in ("generated_tokens",) if apart else ("rows", "flat_tokens", "generated_tokens"):  # prompts mix apart
        assert int(stock[count]) == int(tree[count]) > 0
    steps = read_csv(tmp_path / "steps.csv")
    of_arm = 3 + apart
    assert len(steps) == 2 * of_arm
    assert all(int(warm_up["rows"]) < int(stock["rows"]) for warm_up in steps[::of_arm])
    for step in steps:
        assert sum(float(step[part]) for part in PARTS[apart:]) == pytest.approx(float(step["step_s"]), rel=1e-3)
        assert all(float(step[part]) >= -0.01 for part in PARTS), step
    assert float(tree["amdahl_speed_up"]) > 1 and float(tree["speed_up"]) > 0


def test_a_speed_up_is_held_against_amdahls_law() -> None:
    line = {"arm": "tree_rl", "por": 0.9, "step_s": 30.0, "rows": 219, "update_ratio": 10.0, "generated_per_s": 9.0}
    line |= dict.fromkeys(PARTS, 1.0) | {"gpu_idle_share": "", "amdahl_speed_up": 2.5, "tool_seconds": 0}
    assert whole_step.describe(line | {"speed_up": 2.26}).endswith("reached 0.90, target 0.9: met")
    assert whole_step.describe(line | {"speed_up": 2.2}).endswith("0.88, target 0.9: missed")
