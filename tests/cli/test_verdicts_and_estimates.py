"""`tree-rl inspect` ends with a verdict, and predicts with a model: figures by hand, laws, one-line errors."""

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Printed, Refused, Run
from record_files import read_of, write

from tree_rl import __version__
from tree_rl.benchmark.results import read_csv
from tree_rl.cost.cluster.gpus import Gpu
from tree_rl.cost.cluster.hardware import OPTIMIZER_RATE, Cluster
from tree_rl.cost.cluster.parameters import Parameters
from tree_rl.cost.memory.budget import MEMORY_FRACTION
from tree_rl.cost.memory.model import GIB, assumed_memory_model
from tree_rl.cost.model_sizes import MODEL_SIZES, known_name
from tree_rl.inspection.appended_rows import append_rows
from tree_rl.inspection.row_file import read_row_file
from tree_rl.inspection.verdict.judgement import DENSE, EXPERTS, Reached

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"
PROMPTS = {"a": [1, 2, 3, 4, 5, 6], "b": [7, 8, 9]}
TAILS = [[10, 11], [10, 12, 13], [14]]
ROWS = [{"uid": uid, "input_ids": prompt + tail, "task": 7} for uid, prompt in PROMPTS.items() for tail in TAILS]
FLAT = sum(len(row["input_ids"]) for row in ROWS)
PREFIXES = {(row["uid"], *row["input_ids"][: end + 1]) for row in ROWS for end in range(len(row["input_ids"]))}
UNIQUE = len(PREFIXES)
LARGEST = 6 + 5
"""Unique tokens of group a: its prompt, and 10, 11, 12, 13, 14 once each."""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.jsonl", ROWS)


def read(out: str) -> dict[str, Any]:
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    assert (found["format"], found["tree_rl"]) == (2, __version__)
    return found


def test_a_verdict_by_hand(printed: Printed, rows: Path) -> None:
    found = read(printed("inspect", rows, "--json", "--update-share", 0.5))
    assert (found["total"]["flat_tokens"], found["total"]["unique_tokens"]) == (FLAT, UNIQUE)
    assert found["total"]["por"] == pytest.approx(1 - UNIQUE / FLAT)
    assert found["taken"] == [{"tokens": ["input_ids"], "loss": None, "padding": None, "group": "uid"}]
    verdict = found["verdict"]
    bound = found["total"]["flop_bound"]
    assert found["merged"] == found["total"] and verdict["prefix_rows"] == 0
    # What Qwen3-32B missed of its bound of 12.27: it reached 0.828 and 0.958.
    update = [1 / (1 / bound + (1 / 0.828 - 1) / 12.27), 1 / (1 / bound + (1 / 0.958 - 1) / 12.28)]
    assert verdict["update_speed_up"] == pytest.approx(update)
    assert verdict["step_speed_up"] == pytest.approx([1 / (0.5 + 0.5 / times) for times in update])
    assert (verdict["helps"], verdict["update_shares"]) == (True, [0.5])
    assert verdict["update_share_needed"] == pytest.approx((1 - 1 / 1.05) / (1 - 1 / update[0]))
    assert [group["name"] for group in found["groups"]] == ["a", "b"]


def test_the_verdict_ends_the_text(printed: Printed, rows: Path) -> None:
    out = printed("inspect", rows, "--update-share", "0.5")
    table, verdict = out.split("\n\nVerdict: ")
    assert table.startswith("group") and "Warning" not in out
    assert verdict.startswith("trees help. Expected: updates ")
    assert "taken       tokens: input_ids; loss: no mask found" in verdict and "group: uid" in verdict
    assert verdict.splitlines()[-1] == f"  next        tree-rl plan {rows} --max-tokens {LARGEST}"
    assert "partitioned" not in follow(printed, verdict.splitlines()[-1].removeprefix("  next        "))


def follow(printed: Printed, command: str) -> str:
    return printed(*shlex.split(command.removeprefix("tree-rl ")))


def test_rows_that_share_nothing_are_not_promised_anything(printed: Printed, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"uid": "a", "input_ids": [number] * 9} for number in range(5)])
    verdict = read(printed("inspect", file, "--json"))["verdict"]
    assert (verdict["helps"], verdict["update_speed_up"], verdict["step_speed_up"]) == (False, [1.0, 1.0], [1.0, 1.0])
    assert verdict["update_share_needed"] is None
    assert "Verdict: trees would save little." in printed("inspect", file)


def measured(files: str, column: str, *, experts: bool) -> list[float]:
    """Of models with experts or of others; rows by flash-attention 2 do not count: fa4 is faster."""
    rows = [row for file in BENCHMARKS.glob(files) for row in read_csv(file) if row.get("packed_attention") != "fa2"]
    shapes = [MODEL_SIZES[known_name(row["model"])].shape for row in rows]
    taken = zip(rows, shapes, strict=True)
    return [float(row[column]) for row, shape in taken if (shape.active_experts > 0) is experts]


@pytest.mark.parametrize(("experts", "reached"), [(False, DENSE), (True, EXPERTS)])
def test_what_was_reached_is_what_the_benchmarks_hold(experts: bool, reached: Reached) -> None:
    shares = measured("update_*.csv", "of_flop_bound", experts=experts)
    engine = measured("whole_model_1gpu.csv", "tree_over_packed_of_bound", experts=experts)
    bounds = measured("whole_model_1gpu.csv", "flop_bound", experts=experts)
    assert reached.bench == pytest.approx((min(shares), max(shares)), abs=5e-4)
    assert reached.engine == pytest.approx((min(engine), max(engine)), abs=5e-4)
    assert reached.engine_bound == pytest.approx((min(bounds), max(bounds)), abs=5e-3)
    for share, bound in zip(reached.engine, reached.engine_bound, strict=True):
        assert share * bound in [pytest.approx(found) for found in reached.speed_up(bound)]


def test_calls_of_an_appending_agent_are_judged_as_one_row(printed: Printed, tmp_path: Path) -> None:
    """Two sessions of one prompt: three calls that append, one of which forks; a first call that nobody continues."""
    calls = [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 8, 8], [1, 2, 3], [1, 2, 3]]
    trained = [[2], [4], [6], [4], [2], [2]]
    records = [
        {"uid": "a", "input_ids": ids, "loss_mask": [int(at in written) for at in range(len(ids))]}
        for ids, written in zip(calls, trained, strict=True)
    ]
    other = {"uid": "b", "input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 1]}
    file = write(tmp_path / "calls.jsonl", [*records, other])
    found = read(printed("inspect", file, "--json"))
    # Of the three equal calls two are continued, by the third call and by the fork.
    assert (found["total"]["rows"], found["merged"]["rows"], found["verdict"]["prefix_rows"]) == (7, 4, 3)
    assert found["merged"]["flat_tokens"] == 7 + 5 + 3 + 4
    assert found["merged"]["unique_tokens"] == found["total"]["unique_tokens"] == 9 + 4
    merged = [(calls[0], [2]), (calls[2], [2, 4, 6]), (calls[3], [2, 4]), ([1, 2, 3, 4], [1, 2, 3])]
    assert read_of(append_rows(read_row_file(file))) == merged
    out = printed("inspect", file)
    assert "3 of 7 rows are plain prefixes of another row of their group" in out
    assert re.search(r"\ntotal +7 .*\nmerged +4 ", out)
    one = write(tmp_path / "one.jsonl", records[1:3])
    assert "All lines below count the 1 merged row\n" in printed("inspect", one)


def test_the_verdict_is_that_of_the_merged_rows(printed: Printed, tmp_path: Path) -> None:
    sessions = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 9]]
    calls = [ids[:end] for ids in sessions for end in range(2, len(ids) + 1, 2)]
    judged = []
    for name, rows in (("calls.jsonl", calls), ("rows.jsonl", sessions)):
        file = write(tmp_path / name, [{"uid": "a", "input_ids": ids} for ids in rows])
        judged.append(read(printed("inspect", file, "--json", "--model", "8b", "--gpus", 1)))
        del judged[-1]["verdict"]["next"], judged[-1]["verdict"]["equal_rows"]
    assert [one["verdict"].pop("prefix_rows") for one in judged] == [5, 0]
    assert judged[0]["verdict"] == judged[1]["verdict"] and judged[0]["prediction"] == judged[1]["prediction"]
    assert judged[0]["total"]["por"] > judged[0]["merged"]["por"] == judged[1]["total"]["por"]


def test_a_share_of_more_than_the_step_is_not_asked_for(printed: Printed, tmp_path: Path) -> None:
    """Updates 1.04 to 1.05 times as fast: whether a step of nothing else gains enough depends on the engine."""
    rows = [{"uid": "a", "input_ids": [*range(10, 17), *[row] * 57]} for row in range(2)]
    file = write(tmp_path / "rows.jsonl", rows)
    verdict = read(printed("inspect", file, "--json", "--update-share", 1))["verdict"]
    assert verdict["helps"] and verdict["update_share_needed"] is None
    out = printed("inspect", file, "--update-share", 1, "--groups", 0)
    assert "Verdict: trees may help." in out and "(1 more group in the total;" in out
    assert out.splitlines()[2].split()[:2] == ["total", "2"]
    assert "whole step  1.04 to 1.05 times if updates take 100% of a step" in out


def test_tables_are_aligned_whatever_their_letters(printed: Printed, tmp_path: Path) -> None:
    rows = [{"uid": uid, "input_ids": [1, 2]} for uid in ("搜索网页", "a" * 8)]
    lines = printed("inspect", write(tmp_path / "rows.jsonl", rows)).splitlines()[2:4]
    assert [line.replace("搜索网页", "a" * 8) for line in lines] == [lines[1]] * 2


def test_shares_are_a_range_until_a_log_tells_one(printed: Printed, rows: Path) -> None:
    verdict = read(printed("inspect", rows, "--json"))["verdict"]
    least, most = verdict["update_speed_up"]
    assert verdict["update_shares"] == [0.2, 0.4, 0.6]
    assert verdict["step_speed_up"] == pytest.approx([1 / (0.8 + 0.2 / least), 1 / (0.4 + 0.6 / most)])
    said = ", ".join(f"{1 / (1 - share + share / least):.2f}x" for share in (0.2, 0.4, 0.6))
    assert f"  whole step  {said} if updates take 20%, 40%, 60% of a step (assumed; " in printed("inspect", rows)


def test_experts_are_judged_by_what_experts_reached(printed: Printed, rows: Path, tmp_path: Path) -> None:
    given = ("inspect", rows, "--model", write(tmp_path / "moe.json", MODEL_SIZES["qwen3-30b-a3b"].config))
    found = read(printed(*given, "--json"))
    assert found["verdict"]["update_speed_up"] == pytest.approx(EXPERTS.speed_up(found["total"]["flop_bound"]))
    assert "models with experts, on one H200: 0.69 to 0.87" in printed(*given)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_missing_group_is_told_and_others_are_tried(printed: Printed, tmp_path: Path, ending: str) -> None:
    records = [
        {"input_ids": row["input_ids"], "prompt_name": row["uid"], "row": number, "same": "x", "maybe": None}
        | {"session": "many" if number < 2 else str(number)}
        for number, row in enumerate(ROWS)
    ]
    file = write(tmp_path / f"rows.{ending}", records)
    found = read(printed("inspect", file, "--json"))
    assert found["taken"][0]["group"] is None
    # Sessions have hardly a row each, so prompts come first. The two rows of one session share their prompt.
    pairs = [("prompt_name", 2, 1 - UNIQUE / FLAT), ("session", 5, (len(PROMPTS["a"]) + 1) / FLAT)]
    assert [tuple(one.values()) for one in found["group_by"]] == [(*pair[:2], pytest.approx(pair[2])) for pair in pairs]
    assert found["verdict"]["next"] == f"tree-rl inspect {file} --group-by prompt_name"
    out = printed("inspect", file)
    assert out.startswith("Warning: no column uid, group, group_id or task_id")
    assert "group: none found, the file is one group" in out
    again = follow(printed, found["verdict"]["next"])
    assert "Warning" not in again and f"{1 - UNIQUE / FLAT:.3f}" in again
    bare = write(tmp_path / f"bare.{ending}", [{"input_ids": row["input_ids"]} for row in ROWS])
    assert "No other column has a text or an integer in every row" in printed("inspect", bare)


def test_files_of_a_folder_are_regrouped(printed: Printed, tmp_path: Path) -> None:
    """As folders of trajectories, a file each: by the task they share what their files do not."""
    for number, row in enumerate(ROWS):
        record = {"input_ids": row["input_ids"], "instance": row["uid"], "agent": "x", "file": number}
        write(tmp_path / f"{number}.jsonl", [record])
    found = read(printed("inspect", tmp_path, "--json"))
    assert (len(found["groups"]), found["total"]["por"]) == (6, 0)
    assert found["group_by"] == [{"column": "instance", "groups": 2, "por": pytest.approx(1 - UNIQUE / FLAT)}]
    assert "would save little, if these are the groups" in printed("inspect", tmp_path)


CONSOLE = """(TaskRunner pid=1) step:{step} - actor/loss:0.1 - timing_s/gen:{gen} - timing_s/old_log_prob:{old} - \
timing_s/update_actor:np.float64({update}) - timing_s/step:{total} - timing_per_token_ms/gen:9e9 - perf/x:inf"""


def test_timing_is_measured_from_verls_logs(printed: Printed, rows: Path, tmp_path: Path) -> None:
    """Shares 0.9, 0.5 and 0.25: the median, whatever else a log holds."""
    steps = [(1, 2.0, 7.0, 10.0), (2, 1.0, 4.0, 10.0), (3, 0.5, 2.0, 1e1)]
    lines = [CONSOLE.format(step=n, gen=1e-3, old=old, update=update, total=total) for n, old, update, total in steps]
    lines += [lines[0][:40], CONSOLE.format(step=4, gen=1, old=1, update=1, total="1e999")]
    (tmp_path / "console.log").write_bytes("\n".join(["\x1b[36mé", *lines]).encode() + b"\xff\xfe\n")
    names = ("timing_s/old_log_prob", "timing_s/update_actor", "timing_s/step", "x")
    records = [dict(zip(names, (*seconds, math.nan), strict=True)) for _, *seconds in steps]
    whole = [json.dumps({"step": n, "data": data}) for n, data in enumerate(records)]
    for name in ("file.jsonl", "named_by_the_user.txt"):
        (tmp_path / name).write_text("\n".join([*whole, whole[0][:30]]))
    for name in ("console.log", "file.jsonl", "named_by_the_user.txt"):
        verdict = read(printed("inspect", rows, "--json", "--timing", tmp_path / name))["verdict"]
        assert verdict["update_shares"] == pytest.approx([0.5])
        assert verdict["update_shares_from"].startswith("median of 3 steps in ")


def test_a_share_of_nothing_tells_no_step(printed: Printed, rows: Path) -> None:
    for share in ("0", "1e-320"):
        found = read(printed("inspect", rows, "--model", "8b", "--update-share", share, "--gpu-price", 1, "--json"))
        (step,) = found["prediction"]["steps"]
        assert step["rows"]["seconds"] is step["trees"]["price"] is None
        assert step["speed_up"] == pytest.approx(1)


def test_wrong_options_end_in_one_line(refused: Refused, rows: Path, tmp_path: Path) -> None:
    trees = tmp_path / "trees.log"
    trees.write_text("step:1 - tree/unique_tokens:5 - timing_s/update_actor:1 - timing_s/step:2\n")
    for given, said in (
        (("--timing", trees), "expected a run without trees, this one ran trees"),
        (("--timing", rows), "with timing_s/step and timing_s/update_actor; found none"),
        (("--timing", tmp_path / "absent"), "no such file"),
        (("--timing", trees, "--update-share", 0.5), "expected one of them, received both"),
        (("--update-share", 1.5), "--update-share"),
        (("--update-share", "nan"), "--update-share"),
        (("--gpu", "h2000"), "--gpu"),
        (("--json", "--draw", "text", "-"), "--json and --draw: expected a file"),
        (("--timing", "."), "expected a file, received a folder"),
        (("--gpu-price", "1"), "--gpu-price: expected it together with --model"),
        (("--model", "absent.json"), "absent.json: no such file"),
        *((("--model", "8b", "--gpus", wrong), "--gpus") for wrong in ("0", "99999999999999999999")),
        *((("--model", "8b", "--gpu-price", wrong), "--gpu-price") for wrong in ("-1", "inf")),
    ):
        refused(said, "inspect", rows, *given)


def test_a_name_stands_for_a_config(printed: Printed, refused: Refused, rows: Path, tmp_path: Path) -> None:
    config = write(tmp_path / "config.json", MODEL_SIZES["8b"].config)
    given, models = ("inspect", rows, "--json", "--gpus", 1, "--model"), (config, "8b", "qwen3-8b", "Qwen3-8B")
    by_file, *by_name = (read(printed(*given, model)) for model in models)
    assert f" --model {config} " in by_file["verdict"].pop("next")
    for found in by_name:
        del found["verdict"]["next"]
        assert found == by_file
    printed("plan", rows, "--model", "8b", "--max-tokens", 8)
    printed("view", rows, "--model", "8b", "--html", tmp_path / "page.html")
    refused("one of tiny, 0.6b, 8b, 32b", "inspect", rows, "--model", "9b")


@pytest.mark.parametrize("is_masked", [False, True])
def test_an_estimate_by_hand(printed: Printed, tmp_path: Path, is_masked: bool) -> None:
    """One GPU: nothing travels. Operations of each row by itself and of each tree, from the formulas of a decoder."""
    prompts, lengths = [len(PROMPTS[row["uid"]]) for row in ROWS], [len(row["input_ids"]) for row in ROWS]
    parts = zip(ROWS, prompts, lengths, strict=True)
    records = [{**row, "loss_mask": [int(not is_masked)] * at + [1] * (end - at)} for row, at, end in parts]
    rows = write(tmp_path / "rows.jsonl", records)
    given = ("--model", "8b", "--gpus", 1, "--gpu", "b200", "--update-share", 0.4, "--gpu-price", 3.6)
    found = read(printed("inspect", rows, *given, "--json"))["prediction"]
    sizes = MODEL_SIZES["8b"].config
    width, heads, keys = sizes["hidden_size"], sizes["num_attention_heads"], sizes["num_key_value_heads"]
    head, layers, vocabulary = sizes["head_dim"], sizes["num_hidden_layers"], sizes["vocab_size"]
    layer = 2 * width * head * (heads + keys) + 3 * width * sizes["intermediate_size"]

    def seconds(tokens: int, pairs: int, trained: int) -> float:
        forward = 2 * (tokens * layers * layer + trained * width * vocabulary) + 4 * pairs * layers * heads * head
        # Log-probs and forward one each, a backward with recomputed layers three.
        computed = 5 * forward / (Cluster.flops * 2250 / 989)
        return computed + (layers * layer + 2 * width * vocabulary) / OPTIMIZER_RATE

    without = sum(prompts) if is_masked else 0
    flat = seconds(FLAT, sum(length * (length + 1) // 2 for length in lengths), FLAT - without)
    without = sum(map(len, PROMPTS.values())) if is_masked else 0
    tree = seconds(UNIQUE, sum(len(prefix) - 1 for prefix in PREFIXES), UNIQUE - without)
    assert found["rows"]["update_seconds"] == pytest.approx(flat, rel=1e-9)
    assert found["trees"]["update_seconds"] == pytest.approx(tree, rel=1e-9)
    (step,) = found["steps"]
    assert step["rows"]["seconds"] == pytest.approx(flat / 0.4)
    assert step["trees"]["seconds"] == pytest.approx(flat / 0.4 - flat + tree)
    # 3.6 an hour is a thousandth a second.
    assert step["trees"]["price"] == pytest.approx((flat / 0.4 - flat + tree) / 1000)
    assert step["speed_up"] == pytest.approx(step["rows"]["seconds"] / step["trees"]["seconds"])


def test_the_best_budget_is_the_largest_that_fits(printed: Printed, rows: Path) -> None:
    found = read(printed("inspect", rows, "--model", "8b", "--gpus", 8, "--gpu", "h100", "--json"))["verdict"]["memory"]
    model = assumed_memory_model(MODEL_SIZES["8b"].shape)
    room = MEMORY_FRACTION * Gpu.H100.spec.memory_gib * GIB - found["state_bytes"]
    assert found["max_tokens"] % 1024 == 0
    assert model.bytes_of(found["max_tokens"]) <= room < model.bytes_of(found["max_tokens"] + 1024)
    sizes = Parameters.of(MODEL_SIZES["8b"].shape, MODEL_SIZES["8b"].config)
    # Two gathered layers in bf16 and the gradients of one in float32; embedding and head once.
    assert found["state_bytes"] == 16 * sizes.total / 8 + 8 * sizes.per_layer + 6 * sizes.root
    assert found["trees_whole"]["tokens"] == LARGEST
    longest = max(len(row["input_ids"]) for row in ROWS)
    gpu_bytes = pytest.approx(found["state_bytes"] + model.bytes_of(longest))
    assert found["rows"] == {"tokens": longest, "gpu_bytes": gpu_bytes, "runs_as": "the longest row"}
    assert found["largest_runs_as"] == "whole"


def test_a_tree_beyond_the_gpu_is_cut(printed: Printed, tmp_path: Path) -> None:
    """A long trunk: whole it needs more than partitions, and more than an L40S has."""
    trunk = list(range(1, 60_000))
    file = write(tmp_path / "rows.jsonl", [{"uid": "a", "input_ids": [*trunk, tail]} for tail in (1, 2)])
    given = ("--model", "8b", "--gpus", 64, "--gpu", "l40s")
    memory = read(printed("inspect", file, *given, "--json"))["verdict"]["memory"]
    assert memory["max_tokens"] < memory["trees_whole"]["tokens"] == 60_001
    assert memory["trees_least"]["gpu_bytes"] < memory["trees_whole"]["gpu_bytes"]
    assert memory["largest_runs_as"] != "whole"
    out = printed("inspect", file, *given)
    assert f"Best max_tokens: {memory['max_tokens']:,} fills 80% of a GPU" in out
    assert "Nothing was measured on l40s" in out
    follow(printed, out.splitlines()[-1].removeprefix("  next        "))


def test_a_model_too_large_for_the_gpus_is_said_to_be(printed: Printed, rows: Path) -> None:
    out = printed("inspect", rows, "--model", "8b", "--gpus", 1, "--gpu", "a100")
    # 16 bytes for each of 8.19e9 parameters.
    assert "none fits: 122 GiB of 79 are taken before the first token; take more GPUs" in out
    assert out.splitlines()[-1].endswith("--gpus 2")
    found = read(printed("inspect", rows, "--model", "8b", "--gpu", "a100", "--json"))["verdict"]
    assert found["memory"]["gpus"] == 8 and found["memory"]["max_tokens"] > 1024
    assert found["next"].startswith(f"tree-rl plan {rows} --model 8b --max-tokens ")


def test_plans_are_json_too(printed: Printed, rows: Path) -> None:
    plan = read(printed("plan", rows, "--max-tokens", 8, "--json"))
    assert [group["unique_tokens"] for group in plan["groups"]] == [LARGEST, UNIQUE - LARGEST]
    assert [group["partitions"] is None for group in plan["groups"]] == [False, True]
    steps = read(printed("plan", rows, "--max-tokens", 8, "--ranks", 8, "--model", "8b", "--json"))["steps"]
    assert [step["sp"] for step in steps] == [1, 2, 4, 8]
    parts = ("balanced", "waiting", "gathers", "exchanges", "optimizer")
    assert steps[0]["seconds"] == pytest.approx(sum(steps[0][f"{part}_seconds"] for part in parts))


def test_version_help_and_completion(tree_rl: Run, printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tree_rl("--version") == (0, f"tree_rl {__version__}\n", "")
    for command in ("inspect", "plan"):
        words = printed(command, "--help")
        assert all(word in words for word in ("POR", "unique", "bound", "group"))
    monkeypatch.setenv("_TREE_RL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "tree-rl ins")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert tree_rl()[1].strip() == "inspect"


def test_an_old_name_ends_with_the_new_command_and_an_unset_variable_reads_no_folder(tree_rl: Run) -> None:
    assert tree_rl("inspect", "") == (2, "", "tree-rl: an argument is empty: is a variable of the shell not set?\n")
    for old, new in (
        (("estimate", "my rows.jsonl", "--model", "8b", "--gpus", "4"), "inspect 'my rows.jsonl' --model 8b --gpus 4"),
        (("top", "outputs/run", "--once"), "report --watch outputs/run"),
    ):
        assert tree_rl(*old) == (2, "", f"tree-rl: {old[0]} has another name now; type: tree-rl {new}\n")
