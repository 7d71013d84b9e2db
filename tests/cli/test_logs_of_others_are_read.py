"""Logs of model calls, dumps of other trainers and models of the local cache give the rows that were run."""

import json
import queue
from itertools import chain
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from byte_tokenizer import write_byte_tokenizer
from fixture_types import Printed, Refused
from record_files import read_of, write
from tokenizers import Tokenizer

from tree_rl.cost.model_sizes import MODEL_SIZES
from tree_rl.inspection.chat_rows import RowsPer
from tree_rl.inspection.files import InputError
from tree_rl.inspection.recording import Recording
from tree_rl.inspection.row_file import read_recording, read_row_file

ASKED = [{"role": "system", "content": "You mend code."}, {"role": "user", "content": "Fix it."}]
ANSWER = {"role": "assistant", "content": "Done."}
SECOND = [*ASKED, ANSWER, {"role": "user", "content": "Again."}]
TOOLS = [{"type": "function", "function": {"name": "ls", "description": "List.", "parameters": {}}}]
TEMPLATE = """{% if tools %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token for each byte, and control tokens."""
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


def choices(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "choices": [{"index": n, "message": one} for n, one in enumerate(messages)]}


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    text = message["content"]
    return {**message, "content": [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}]}


NULLS = {"tool_calls": None, "refusal": None}
CALLS: dict[str, list[dict[str, Any]]] = {
    "openai": [
        {"request": {"model": "m", "messages": ASKED, "tools": TOOLS}, "response": choices({**ANSWER, **NULLS})},
        {"request": {"model": "m", "messages": SECOND, "tools": TOOLS}, "response": choices(ANSWER)},
        {"request": {"model": "m", "messages": SECOND}, "response": {"error": {"message": "overloaded"}}},
    ],
    "openai, content in parts": [
        {"request": {"messages": list(map(in_parts, asked)), "tools": TOOLS}, "response": choices(in_parts(ANSWER))}
        for asked in (ASKED, SECOND)
    ],
    "litellm": [
        {"trace_id": "t", "messages": asked, "response": answer, "model_parameters": {"tools": TOOLS}}
        for asked, answer in ((ASKED, choices(ANSWER)), (SECOND, choices(ANSWER)), (ASKED, None))
    ],
    "langfuse": [
        {"type": "SPAN", "traceId": "t", "input": {"args": []}, "output": {"kwargs": {}}},
        {"type": "GENERATION", "traceId": "t", "input": {"messages": ASKED, "tools": TOOLS}, "output": ANSWER},
        {"type": "GENERATION", "traceId": "t", "input": {"messages": SECOND, "tools": TOOLS}, "output": "Done."},
    ],
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_a_row_whose_answer_is_trained(name: str, tmp_path: Path, tokenizer: Path) -> None:
    plain = {"messages": [*SECOND, ANSWER], "tools": TOOLS}
    expected = read_row_file(write(tmp_path / "plain.json", [plain]), tokenizer=tokenizer, rows_per=RowsPer.CALL)
    found = read_recording(write(tmp_path / "calls.jsonl", CALLS[name]), tokenizer=tokenizer)
    assert read_of(found.rows) == read_of(expected)
    (taken,) = found.taken
    left_out = len(CALLS[name]) - 2
    assert taken.group is None
    assert ("(1 record left out: no answered call)" in str(taken)) == (left_out == 1)


def ids_of(recording: Recording) -> list[list[int]]:
    return [row.token_ids.tolist() for row in recording.rows]


@pytest.mark.slow
def test_what_litellm_logs(tmp_path: Path, tokenizer: Path) -> None:
    # Seconds of import that only this test pays.
    litellm = pytest.importorskip("litellm")
    from litellm.integrations.custom_logger import CustomLogger

    written = queue.Queue[dict[str, Any]]()

    class Log(CustomLogger):  # type: ignore[misc]
        def log_success_event(self, kwargs: dict[str, Any], **_: object) -> None:
            written.put(kwargs["standard_logging_object"])

    litellm.callbacks = [Log()]
    try:
        litellm.completion(model="gpt-4o", messages=ASKED, tools=TOOLS, mock_response="Done.")
        record = json.loads(json.dumps(written.get(timeout=120), default=str))
    finally:
        litellm.callbacks = []
    found = read_recording(write(tmp_path / "log.jsonl", [record]), tokenizer=tokenizer)
    expected = read_recording(write(tmp_path / "calls.jsonl", CALLS["openai"][:1]), tokenizer=tokenizer)
    assert ids_of(found) == ids_of(expected)
    assert found.taken[0].tokens == ("messages", "response")


def test_every_choice_is_a_row(tmp_path: Path, tokenizer: Path) -> None:
    record = {"request": {"messages": ASKED}, "response": choices(ANSWER, {**ANSWER, "content": "No."}), "session": 4}
    found = read_recording(write(tmp_path / "calls.jsonl", [record]), tokenizer=tokenizer)
    assert [row.record for row in found.rows] == [0, 0]
    assert found.labels == {"session": ["4", "4"]}
    first, second = ids_of(found)
    assert first != second and first[:10] == second[:10]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"request": {"prompt": "x"}, "response": choices(ANSWER)}, "row 0, column request: expected chat messages"),
        ({"request": {"messages": []}, "response": choices(ANSWER)}, "row 0, column request: expected chat messages"),
        ({"request": {"messages": ASKED}, "response": {"choices": [{"delta": {}}]}}, "join the chunks of streamed"),
        ({"request": {"messages": ASKED}, "response": {"choices": 5}}, "row 0, column response: expected choices"),
        ({"request": {"messages": ASKED}, "response": [7]}, "row 0, column response: expected choices"),
        ({"request": {"messages": ASKED}, "response": {"error": "x"}}, "expected an answered call, found none in 1"),
        ({"prompt": "x", "completion": 5}, "expected text in the columns prompt and completion"),
        ({"prompt": "", "completion": ""}, "row 0: expected a token, found none"),
        ({"prompt": "x", "completion": "y", "segments": [{"role": "gen"}]}, "row 0, column segments: expected a list"),
        ({"request": "x", "response": "y"}, "received request, response"),
    ],
)
def test_wrong_records_are_named(record: Any, said: str, tmp_path: Path, tokenizer: Path, refused: Refused) -> None:
    refused(said, "inspect", write(tmp_path / "log.jsonl", [record]), "--tokenizer", tokenizer)


def test_texts_of_trl(tmp_path: Path, tokenizer: Path) -> None:
    """As `log_completions` writes them."""
    table: dict[str, list[Any]] = {"prompt": ["Fix it.", "Fix it.", "Say no."], "completion": ["Done.", "Dont.", "No."]}
    table |= {"step": [1, 1, 1], "accuracy": [1.0, 0.0, 0.0], "advantage": [1.0, -1.0, 0.0]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "completions_00001.parquet")
    found = read_recording(tmp_path / "completions_00001.parquet", tokenizer=tokenizer)
    vocabulary = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    for row, prompt, completion in zip(found.rows, table["prompt"], table["completion"], strict=True):
        asked, answered = (vocabulary.encode(str(text)).ids for text in (prompt, completion))
        assert row.token_ids.tolist() == asked + answered
        assert row.trained.tolist() == [False] * len(asked) + [True] * len(answered)
    assert [row.group for row in found.rows] == table["prompt"]
    assert found.taken[0].group == "equal prompt" and not found.labels
    with pytest.raises(InputError, match="text needs --tokenizer"):
        read_row_file(tmp_path / "completions_00001.parquet")


def test_segments_of_areal(tmp_path: Path, tokenizer: Path) -> None:
    segments = [("prompt", "Fix it."), ("gen", " ls"), ("context", " a.py"), ("gen", " Done.")]
    texts = [text for _, text in segments]
    single = {"task_id": 3, "sample_idx": 0, "reward": 1.0, "version_rle": [[0, 2]]}
    single |= {"prompt": texts[0], "completion": "".join(texts[1:])}
    record = {**single, "segments": [{"role": role, "len": 1, "text": text} for role, text in segments]}
    (tmp_path / "dump" / "0").mkdir(parents=True)
    found = read_recording(write(tmp_path / "dump" / "0" / "3.jsonl", [record, single]), tokenizer=tokenizer)
    encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode
    pieces = [encode(text).ids for text in texts]
    several, one = found.rows
    assert several.token_ids.tolist() == list(chain(*pieces))
    sampled = [[role == "gen"] * len(ids) for (role, _), ids in zip(segments, pieces, strict=True)]
    assert several.trained.tolist() == list(chain(*sampled))
    assert one.trained.tolist() == [False] * len(pieces[0]) + [True] * (len(one.token_ids) - len(pieces[0]))
    assert {row.group for row in found.rows} == {"3"}


def save_session(folder: Path, *trajectories: tuple[list[int], list[int], list[int]]) -> None:
    folder.mkdir(parents=True)
    names = ("prompt_ids", "response_ids", "response_mask")
    arrays = {
        f"traj{number}_{name}": np.asarray(values, dtype=np.int32)
        for number, trajectory in enumerate(trajectories)
        for name, values in zip(names, trajectory, strict=True)
    }
    np.savez_compressed(folder / "trajectory.npz", **arrays)
    (folder / "trajectory.json").write_text(json.dumps({"session_id": folder.name, "trajectories": []}))


def test_arrays_of_uni_agent(tmp_path: Path) -> None:
    """Sessions of one sample are a group; eleven trajectories keep their order."""
    log = tmp_path / "logs"
    save_session(log / "step_1" / "session-sample-0-rollout-0-ab12", ([1, 2], [3, 4], [1, 0]), ([1, 2], [5], [1]))
    save_session(log / "step_1" / "session-sample-0-rollout-1-ab13", ([1, 2], [3], [1]))
    save_session(log / "step_2" / "session-sample-0-rollout-0-ab14", *[([1], [number], [1]) for number in range(11)])
    save_session(log / "other", ([9], [9], [1]))
    found = read_recording(log)
    assert found.has_groups
    assert ids_of(found)[1:4] == [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3]]
    assert [row.token_ids[-1] for row in found.rows[4:]] == list(range(11))
    assert found.rows[1].trained is not None and found.rows[1].trained.tolist() == [False, False, True, False]
    groups = ["other", *["step_1/session-sample-0"] * 3, *["step_2/session-sample-0"] * 11]
    assert [row.group for row in found.rows] == groups
    log.rename(tmp_path / "first")
    save_session(tmp_path / "second" / "step_1" / "session-sample-0-rollout-0-ab12", ([1, 2], [3], [1]))
    groups = [*(f"first/{group}" for group in groups), "second/step_1/session-sample-0"]
    assert [row.group for row in read_recording(tmp_path).rows] == groups


def test_damaged_and_hostile_arrays_end_in_one_line(tmp_path: Path, refused: Refused) -> None:
    good = tmp_path / "good"
    save_session(good, ([1, 2], [3], [1]))
    whole = (good / "trajectory.npz").read_bytes()
    np.savez(tmp_path / "other.npz", a=np.arange(3))
    np.savez(tmp_path / "half.npz", traj0_prompt_ids=np.arange(3))
    np.savez(tmp_path / "pickled.npz", traj0_prompt_ids=np.array([{}], dtype=object))
    np.save(tmp_path / "one.npy", np.arange(3))
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    (tmp_path / "cut.npz").write_bytes(whole[:100])
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "text.npz").write_text("[]")
    for name in ("other", "half", "pickled", "one", "cut", "empty", "text"):
        refused(f"{name}.npz: expected ", "inspect", tmp_path / f"{name}.npz")


def test_a_hub_id_is_found_in_the_local_cache(
    tmp_path: Path, tokenizer: Path, printed: Printed, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--Someone--Small-1.5" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in tokenizer.iterdir():
        (snapshot / file.name).symlink_to(file)
    (snapshot / "config.json").write_text(json.dumps(MODEL_SIZES["tiny"].config))
    refs = tmp_path / "hub" / "models--Someone--Small-1.5" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    rows = write(tmp_path / "rows.jsonl", [{"messages": [*ASKED, ANSWER], "uid": "a"}])
    named = ("--tokenizer", "Someone/Small-1.5", "--model", "Someone/Small-1.5")
    out = printed("inspect", rows, *named)
    assert f"tree-rl plan {rows} --tokenizer Someone/Small-1.5 --model Someone/Small-1.5 --max-tokens " in out
    for option, missing in (("--tokenizer", "tokenizer.json tokenizer_config.json"), ("--model", "config.json")):
        given = ("inspect", rows, "--tokenizer", tokenizer, option, "Someone/Else")
        for said in (f"{option} Someone/Else: no such folder", f"download it: hf download Someone/Else {missing}"):
            refused(said, *given)
    refused("Someone/config.json: no such file", "inspect", rows, "--model", "Someone/config.json")
