"""What a restart relies on, without Ray: whole checkpoints, the ledger, trees set aside, random numbers of a row."""

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job import read_ledger
from omegaconf import OmegaConf

from tree_rl.verl_plugin.agent_loops.request_seeds import SeededClient, draws_are_seeded
from tree_rl.verl_plugin.agent_loops.tree_dump import FinishedRow, append_tree, set_aside_later_trees
from tree_rl.verl_plugin.resume.checkpoint_commit import TRACKER, begin_checkpoint, commit_checkpoint
from tree_rl.verl_plugin.resume.checkpoint_parts import Part, refuse_damaged, seal_checkpoint, why_checkpoint_damaged
from tree_rl.verl_plugin.resume.checkpoint_record import RECORD
from tree_rl.verl_plugin.resume.choose_checkpoint import choose_checkpoint
from tree_rl.verl_plugin.resume.file_marks import files_below, seal_files
from tree_rl.verl_plugin.resume.rank_files import CheckpointFilesWorker, files_to_load, rank_of_file
from tree_rl.verl_plugin.resume.row_names import prompt_uid, row_place
from tree_rl.verl_plugin.resume.update_ledger import LEDGER, record_update, restore_ledger


def chosen(root: Path) -> int | None:
    """The step that a restart goes on from, with no other files than the trainer's."""
    return choose_checkpoint(root, lambda folder, record: why_checkpoint_damaged(folder, record, []))


def test_a_kill_before_the_first_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    assert chosen(tmp_path / "nothing") is None
    begin_checkpoint(tmp_path, 2)
    (tmp_path / TRACKER).write_text("2")
    assert chosen(tmp_path) is None and not (tmp_path / TRACKER).exists()
    assert chosen(tmp_path) is None


def test_the_record_is_on_disk_between_files_and_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(str(tmp_path)))

    monkeypatch.setattr(os, "fsync", fsync)
    folder = begin_checkpoint(tmp_path, 2)
    (folder / "queue").mkdir()
    (folder / "queue" / "rows.pt").write_bytes(b"w")
    (tmp_path / TRACKER).write_text("2")
    commit_checkpoint(tmp_path, 2, seal_files(folder, [name for name in files_below(folder) if name != RECORD]))
    monkeypatch.undo()
    names = [path.removesuffix(f".{os.getpid()}") for path in synced]
    place, record = "/global_step_2", "/global_step_2/.tree_checkpoint.json"
    before = [place, "", f"{place}/queue/rows.pt", place, f"{place}/queue"]
    assert names[names.index(record) + 1 :] == [*before, record, place, "/.latest_checkpointed_iteration.txt", ""]


def test_every_file_belongs_to_one_rank() -> None:
    names = [name for rank in range(8) for name in files_to_load(["model", "optimizer", "extra"], 8, rank)]
    names += ["fsdp_config.json", "huggingface/config.json", "tree_engine_world_size_8_rank_7.json"]
    assert [rank_of_file(name, 8) for name in names] == [r for r in range(8) for _ in range(3)] + [0, 0, 7]
    # Files of an earlier start with more ranks.
    assert {rank_of_file(name, 4) for name in names} == {0}
    assert files_to_load(["model"], 2, 1) == ["model_world_size_2_rank_1.pt"]


class TwoNodes:
    """A worker group of two ranks whose disks are not shared."""

    world_size = 2

    def __init__(self, disks: list[Path]) -> None:
        self.disks = disks

    def __getattr__(self, method: str) -> Any:
        def ask(folder: str, *arguments: Any) -> list[Any]:
            answers = []
            for rank, disk in enumerate(self.disks):
                worker = CheckpointFilesWorker()
                worker.rank, worker.world_size = rank, self.world_size
                answers.append(getattr(worker, method)(folder.replace(str(self.disks[0]), str(disk)), *arguments))
            return answers

        return ask


def test_damage_on_the_disk_of_one_node_decides_for_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disks = [tmp_path / "node0", tmp_path / "node1"]
    parts = [Part(folder="actor", workers=TwoNodes(disks), contents=["model"])]
    for step in (2, 4):
        folder = begin_checkpoint(disks[0], step)
        for rank, disk in enumerate(disks):
            (disk / folder.name / "actor").mkdir(parents=True)
            (disk / folder.name / "actor" / f"model_world_size_2_rank_{rank}.pt").write_bytes(bytes([step, rank]))
        commit_checkpoint(disks[0], step, seal_checkpoint(folder, parts))

    def choice() -> int | None:
        return choose_checkpoint(disks[0], lambda folder, record: why_checkpoint_damaged(folder, record, parts))

    assert choice() == 4
    other = [disks[1] / f"global_step_{step}" / "actor" / "model_world_size_2_rank_1.pt" for step in (2, 4)]
    other[1].write_bytes(b"xx")
    assert choice() == 2 and str(other[1]) in caplog.text
    refuse_damaged(disks[0] / "global_step_4")
    other[0].unlink()
    with pytest.raises(ValueError, match=f"no checkpoint is whole.*{other[0]} is missing"):
        choice()


def rows(step: int) -> dict[str, np.ndarray]:
    uid = prompt_uid(step, 0)
    return {f"{uid}_{session}_0": np.arange(3 + session) for session in range(12)}


def test_the_ledger_holds_every_trained_row_once(tmp_path: Path) -> None:
    def train(step: int) -> None:
        record_update(tmp_path, step, 0, rows(step), {prompt_uid(step, 0): 7 * step})

    for step in (1, 2, 3):
        train(step)
    uninterrupted = read_ledger(tmp_path)
    found = [(group["step"], group["index"], group["rows"]) for group in uninterrupted]
    assert found == [(step, 7 * step, 12) for step in (1, 2, 3)]
    assert len({group["digest"] for group in uninterrupted}) == 3
    # Killed in the middle of a line after step 3, resumed from step 1.
    with (tmp_path / LEDGER).open("a") as stream:
        stream.write('{"step": 4, "upd')
    restore_ledger(tmp_path, 1, None)
    train(2)
    train(3)
    assert read_ledger(tmp_path) == uninterrupted


def test_without_a_copy_whole_lines_of_a_damaged_ledger_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        record_update(tmp_path, step, 0, rows(step), {prompt_uid(step, 0): step})
    saved = (tmp_path / LEDGER).read_bytes()
    lines = saved.splitlines(keepends=True)
    (tmp_path / LEDGER).write_bytes(lines[0] + b"\0\0\xff\n[]\n" + lines[1] + b'{"step": 2, "upd')
    restore_ledger(tmp_path, 2, None)
    assert (tmp_path / LEDGER).read_bytes() == saved and "2 damaged lines" in caplog.records[-1].getMessage()


def test_a_changed_token_or_key_changes_the_digest(tmp_path: Path) -> None:
    def digest(tokens: dict[str, Any]) -> str:
        record_update(tmp_path, 1, 0, tokens, {"u": 0})
        return read_ledger(tmp_path)[-1]["digest"]

    base = digest({"u_0_0": [1, 2], "u_1_0": [3]})
    assert base == digest({"u_1_0": [3], "u_0_0": [1, 2]})
    assert base != digest({"u_0_0": [1, 2], "u_1_0": [4]}) and base != digest({"u_0_0": [1, 2], "u_2_0": [3]})


def test_trees_of_steps_done_again_are_set_aside(tmp_path: Path) -> None:
    row = {"uid": "u", "session": 0, "index": 0, "prompt_ids": (1,), "response_ids": (2,), "response_mask": (1,)}
    paths = {
        step: append_tree(tmp_path, "train", [FinishedRow(step=step, reward=0.0, **row)])  # type: ignore[arg-type]
        for step in (1, 2, 3)
    }
    set_aside_later_trees(tmp_path, 2)
    set_aside_later_trees(tmp_path / "nothing", 2)
    assert sorted(tmp_path.glob("*.jsonl")) == [paths[1], paths[2]]
    assert len(list(tmp_path.glob("*.replaced"))) == 1


def test_prompts_have_the_same_name_whenever_a_step_is_done() -> None:
    names = [prompt_uid(step, place) for step in range(50) for place in range(50)]
    assert len(set(names)) == 2500 and prompt_uid(3, 4) == names[3 * 50 + 4]
    assert all("_" not in name for name in names)
    assert sorted(["a_10_0", "a_2_1", "a_2_0"], key=row_place) == ["a_2_0", "a_2_1", "a_10_0"]


class Recorder:
    """An LLM client that notes the seeds it is sent."""

    tokenizer = "tokenizer"

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> int:
        return sampling_params.get("seed", -1)


def sent_seed(client: SeededClient, prompt: list[int], **sampling: int) -> int:
    return asyncio.run(client.generate("r", prompt_ids=prompt, sampling_params=sampling))


def seeds_of_session(*parts: int | str, order: list[list[int]]) -> list[int]:
    client = SeededClient(Recorder())
    seed = client.open_session(*parts)
    try:
        return [sent_seed(client, prompt, seed=seed) for prompt in order]
    finally:
        client.close_session(seed)


def test_a_call_draws_by_row_and_prompt_not_by_order_or_history() -> None:
    prompts = [[1, 2], [1, 2, 3], [1, 2]]
    first = seeds_of_session(42, 5, "train", "u", 0, order=prompts)
    assert len(set(first)) == 3
    assert seeds_of_session(42, 5, "train", "u", 0, order=prompts) == first
    assert sorted(seeds_of_session(42, 5, "train", "u", 0, order=prompts[::-1])) == sorted(first)
    for place, part in enumerate((43, 6, "val", "v", 1)):
        other = [part if at == place else own for at, own in enumerate((42, 5, "train", "u", 0))]
        assert not set(seeds_of_session(*other, order=prompts)) & set(first)
    client = SeededClient(Recorder())
    assert sent_seed(client, [1], seed=9) == 9 and sent_seed(client, [1]) == -1
    assert client.tokenizer == "tokenizer"


def test_only_engines_that_repeat_a_seeded_draw_are_sent_seeds() -> None:
    cases = (("hf", False, True), ("vllm", False, False), ("vllm", True, True), ("sglang", True, False))
    for name, full, seeded in cases:
        assert draws_are_seeded(OmegaConf.create({"name": name, "full_determinism": full})) is seeded
