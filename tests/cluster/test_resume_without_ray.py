"""What a restart relies on, without Ray: whole checkpoints, the ledger, trees set aside, random numbers of a row."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from job import read_ledger
from omegaconf import OmegaConf

from tree_rl.verl_plugin.agent_loops.request_seeds import SeededClient, draws_are_seeded
from tree_rl.verl_plugin.agent_loops.tree_dump import FinishedRow, append_tree, set_aside_later_trees
from tree_rl.verl_plugin.compat import PPOTrainer
from tree_rl.verl_plugin.resume.checkpoint_commit import (
    RECORD,
    TRACKER,
    begin_checkpoint,
    commit_checkpoint,
    refuse_damaged,
    remove_old_checkpoints,
    repair_tracker,
    why_not_whole,
)
from tree_rl.verl_plugin.resume.resumable_trainer import ResumableTrainer
from tree_rl.verl_plugin.resume.row_names import prompt_uid, row_place
from tree_rl.verl_plugin.resume.update_ledger import LEDGER, cut_ledger, record_update


def save(root: Path, step: int, *, until: str = "committed") -> Path:
    """A checkpoint as the trainer writes it, killed at a point: begun, weights, tracker, committed."""
    folder = begin_checkpoint(root, step)
    if until == "begun":
        return folder
    (folder / "actor").mkdir(exist_ok=True)
    (folder / "actor" / "model.pt").write_bytes(b"w" * (100 + step))
    if until == "weights":
        return folder
    (root / TRACKER).write_text(str(step))
    if until == "tracker":
        return folder
    commit_checkpoint(root, step)
    return folder


@pytest.mark.parametrize("killed_at", ["begun", "weights", "tracker"])
def test_a_half_written_checkpoint_is_not_resumed_from(tmp_path: Path, killed_at: str) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4)
    save(tmp_path, 6, until=killed_at)
    assert repair_tracker(tmp_path) == 4
    assert (tmp_path / TRACKER).read_text() == "4"
    assert save(tmp_path, 6).is_dir() and repair_tracker(tmp_path) == 6


def test_a_tracker_that_a_kill_left_empty_is_written_again(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4, until="weights")
    (tmp_path / TRACKER).write_text("")
    assert repair_tracker(tmp_path) == 2 and (tmp_path / TRACKER).read_text() == "2"


def test_a_kill_before_the_first_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    assert repair_tracker(tmp_path / "nothing") is None
    save(tmp_path, 2, until="tracker")
    assert repair_tracker(tmp_path) is None and not (tmp_path / TRACKER).exists()


def test_a_checkpoint_with_a_short_or_missing_file_is_not_whole(tmp_path: Path) -> None:
    save(tmp_path, 2)
    folder = save(tmp_path, 4)
    model = folder / "actor" / "model.pt"
    model.write_bytes(b"w" * 50)
    assert "model.pt" in str(why_not_whole(folder)) and repair_tracker(tmp_path) == 2
    with pytest.raises(ValueError, match=r"resume_from_path=.*global_step_4.*expected 104 bytes.*resume_mode=auto"):
        refuse_damaged(folder)
    model.unlink()
    assert "missing" in str(why_not_whole(folder))
    refuse_damaged(tmp_path / "global_step_2")


def test_overwriting_a_checkpoint_takes_its_word_back_first(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4)
    save(tmp_path, 4, until="begun")
    assert repair_tracker(tmp_path) == 2


def test_a_checkpoint_of_stock_verl_is_trusted_as_verl_trusts_it(tmp_path: Path) -> None:
    (tmp_path / "global_step_8").mkdir()
    (tmp_path / TRACKER).write_text("8")
    assert repair_tracker(tmp_path) == 8


def test_old_checkpoints_go_only_when_newer_ones_are_whole(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step)
    save(tmp_path, 8, until="weights")
    remove_old_checkpoints(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == [f"global_step_{s}" for s in (4, 6, 8)]
    assert repair_tracker(tmp_path) == 6
    assert json.loads((tmp_path / "global_step_6" / RECORD).read_text())["files"] == {"actor/model.pt": 106}


class Trainer(ResumableTrainer):
    """The tree trainers' checkpoints, without workers."""

    on_step_end = on_sample_end = lambda self: None

    def __init__(self, root: Path, **trainer: Any) -> None:
        self.config = OmegaConf.create(
            {
                "trainer": {"default_local_dir": str(root), "resume_mode": "auto", **trainer},
                "algorithm": {"use_kl_in_reward": True},
                "actor_rollout_ref": {"rollout": {"custom": {"tree_dump_dir": str(root / "trees")}}},
            }
        )
        self.kl_ctrl_in_reward = SimpleNamespace(value=0.1)


def test_the_trainer_keeps_whole_checkpoints_and_its_own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_of_verl = []

    def save_as_verl_does(trainer: Trainer) -> None:
        asked_of_verl.append(trainer.config.trainer.max_actor_ckpt_to_keep)
        folder = tmp_path / f"global_step_{trainer.global_steps}"
        # The checkpoints before are there and whole while this one is written.
        before = [path for path in tmp_path.glob("global_step_*") if path != folder]
        assert all(why_not_whole(path) is None for path in before) and bool(before) == (trainer.global_steps > 2)
        (folder / "data.pt").write_bytes(b"data")
        (tmp_path / TRACKER).write_text(str(trainer.global_steps))

    def load_as_verl_does(trainer: Trainer) -> None:
        trainer.global_steps = int((tmp_path / TRACKER).read_text())

    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", save_as_verl_does)
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", load_as_verl_does)
    trainer = Trainer(tmp_path, max_actor_ckpt_to_keep=1)
    for step in (2, 4, 6):
        trainer.global_steps = step
        trainer.kl_ctrl_in_reward.value = step / 100
        trainer._save_checkpoint()
    assert asked_of_verl == [2, 2, 2] and trainer.config.trainer.max_actor_ckpt_to_keep == 1
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_6"]

    begin_checkpoint(tmp_path, 8)
    (tmp_path / TRACKER).write_text("8")
    record_update(tmp_path, 7, 0, rows(7), {prompt_uid(7, 0): 0})
    again = Trainer(tmp_path)
    again._load_checkpoint()
    assert (again.global_steps, again.kl_ctrl_in_reward.value, read_ledger(tmp_path)) == (6, 0.06, [])


def rows(step: int) -> dict[str, np.ndarray]:
    uid = prompt_uid(step, 0)
    return {f"{uid}_{session}_0": np.arange(3 + session) for session in range(12)}


def test_the_ledger_holds_every_trained_row_once(tmp_path: Path) -> None:
    def train(step: int) -> None:
        record_update(tmp_path, step, 0, rows(step), {prompt_uid(step, 0): 7 * step})

    for step in (1, 2, 3):
        train(step)
    uninterrupted = read_ledger(tmp_path)
    assert [(group["step"], group["index"], group["rows"]) for group in uninterrupted] == [
        (1, 7, 12),
        (2, 14, 12),
        (3, 21, 12),
    ]
    assert len({group["digest"] for group in uninterrupted}) == 3
    # Killed in the middle of a line after step 3, resumed from step 1.
    with (tmp_path / LEDGER).open("a") as stream:
        stream.write('{"step": 4, "upd')
    cut_ledger(tmp_path, 1)
    train(2)
    train(3)
    assert read_ledger(tmp_path) == uninterrupted


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


def seeds_of_session(*parts: int | str, order: list[list[int]]) -> list[int]:
    client = SeededClient(Recorder())
    seed = client.open_session(*parts)
    try:
        return [
            asyncio.run(client.generate("r", prompt_ids=prompt, sampling_params={"seed": seed})) for prompt in order
        ]
    finally:
        client.close_session(seed)


def test_a_call_draws_by_row_and_prompt_not_by_order_or_history() -> None:
    prompts = [[1, 2], [1, 2, 3], [1, 2]]
    first = seeds_of_session(42, 5, "train", "u", 0, order=prompts)
    assert len(set(first)) == 3
    assert seeds_of_session(42, 5, "train", "u", 0, order=prompts) == first
    assert sorted(seeds_of_session(42, 5, "train", "u", 0, order=prompts[::-1])) == sorted(first)
    for other in (
        (43, 5, "train", "u", 0),
        (42, 6, "train", "u", 0),
        (42, 5, "train", "v", 0),
        (42, 5, "train", "u", 1),
    ):
        assert not set(seeds_of_session(*other, order=prompts)) & set(first)
    client = SeededClient(Recorder())
    assert asyncio.run(client.generate("r", prompt_ids=[1], sampling_params={"seed": 9})) == 9
    assert asyncio.run(client.generate("r", prompt_ids=[1], sampling_params={})) == -1
    assert client.tokenizer == "tokenizer"


def test_only_engines_that_repeat_a_seeded_draw_are_sent_seeds() -> None:
    for name, full, seeded in (
        ("hf", False, True),
        ("vllm", False, False),
        ("vllm", True, True),
        ("sglang", True, False),
    ):
        assert draws_are_seeded(OmegaConf.create({"name": name, "full_determinism": full})) is seeded
