"""Whatever is damaged, a resume names the file, takes the newest whole checkpoint, and never loads damaged weights.

verl's own saving and loading without Ray: real engines, one rank of actor and of critic.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import build_engine, save_model, tiny_qwen3
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback

# verl's trainer loads the plugin, and with it the modules below.
from verl.trainer.ppo.v1.trainer_base import PPOTrainer  # noqa: F401

from tree_rl.verl_plugin.options import TreeConfig
from tree_rl.verl_plugin.resume import checkpoint_commit
from tree_rl.verl_plugin.resume.checkpoint_commit import TRACKER
from tree_rl.verl_plugin.resume.checkpoint_record import RECORD, STATE, read_record
from tree_rl.verl_plugin.resume.rank_files import CheckpointFilesWorker
from tree_rl.verl_plugin.resume.resumable_trainer import ResumableTrainer
from tree_rl.verl_plugin.resume.row_names import prompt_uid
from tree_rl.verl_plugin.resume.update_ledger import LEDGER, record_update

STEPS = (2, 4, 6)
LAST = 6
WEIGHTS = "actor/model_world_size_1_rank_0.pt"


def change_a_byte(path: Path) -> None:
    """Of what torch pickled, if it did: a byte between two entries of the archive means nothing."""
    content = bytearray(path.read_bytes())
    content[200 if content.startswith(b"PK\x03\x04") else len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "changed": change_a_byte,
    "missing": lambda path: path.unlink(),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "folder": lambda path: (path.unlink(), (path / "more" / "folders").mkdir(parents=True)),
    "link": lambda path: (path.rename(path.with_name("elsewhere")), path.symlink_to("elsewhere")),
    "dangling link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


class OneRank(CheckpointFilesWorker):
    """A worker group of one rank, in this process."""

    rank, world_size = 0, 1

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def seal_checkpoint_files(self, folder: str) -> Any:
        return [super().seal_checkpoint_files(folder)]

    def find_checkpoint_damage(self, folder: str, files: Any, contents: Any) -> Any:
        return [super().find_checkpoint_damage(folder, files, contents)]

    def save_checkpoint(self, local: str, remote: str | None, step: int, max_ckpt_to_keep: int | None) -> None:
        assert max_ckpt_to_keep is None, "verl must delete no checkpoint"
        self.engine.save_checkpoint(local, remote, step, max_ckpt_to_keep)

    def load_checkpoint(self, local_path: str, del_local_after_load: bool) -> None:
        self.engine.load_checkpoint(local_path, None, del_local_after_load)


class Trainer(ResumableTrainer):
    """The tree trainers' checkpoints; nothing trains."""

    on_step_end = on_sample_end = lambda self: None
    trainer_mode = "sync"

    def __init__(self, root: Path, actor: Any, critic: Any, **trainer: Any) -> None:
        checkpoint = {"checkpoint": {"load_contents": ["model", "optimizer", "extra"], "async_save": False}}
        places = {"default_local_dir": str(root), "default_hdfs_dir": None, "del_local_ckpt_after_load": False}
        roles = {"actor_rollout_ref": {"actor": checkpoint, "rollout": {}}, "critic": checkpoint}
        settings = {"trainer": {**places, "resume_mode": "auto", **trainer}, "algorithm": {"use_kl_in_reward": True}}
        self.config = OmegaConf.create(roles | settings)
        self.actor_rollout_wg, self.critic_wg, self.use_critic = OneRank(actor), OneRank(critic), True
        self.train_dataloader = StatefulDataLoader(list(range(100)), batch_size=2)
        self.batches = iter(self.train_dataloader)
        self.kl_ctrl_in_reward = SimpleNamespace(value=0.0)
        self.checkpoint_callback = build_checkpoint_callback(self.config)

    def train(self, step: int) -> None:
        self.global_steps = step
        for engine in (self.actor_rollout_wg.engine, self.critic_wg.engine):
            set_weights(engine, step)
        next(self.batches)
        self.kl_ctrl_in_reward.value = step / 100
        uid = prompt_uid(step, 0)
        record_update(self._root, step, 0, {f"{uid}_0_0": np.arange(step)}, {uid: step})

    def state(self) -> tuple[Any, ...]:
        """What a resume restores, as numbers: step, weights, data, KL coefficient, ledger."""
        weights = [first_weight(wg.engine) for wg in (self.actor_rollout_wg, self.critic_wg)]
        fetched = self.train_dataloader.state_dict()["_num_yielded"]
        ledger = [json.loads(line)["step"] for line in (self._root / "updates.jsonl").read_text().splitlines()]
        return self.global_steps, weights, fetched, self.kl_ctrl_in_reward.value, ledger


def set_weights(engine: Any, value: float) -> None:
    with torch.no_grad():
        for weight in engine.module.parameters():
            weight.fill_(value)


def first_weight(engine: Any) -> float:
    """The value of all weights; NaN where they differ."""
    values = {float(value) for weight in engine.module.parameters() for value in weight.to_local().detach().unique()}
    return values.pop() if len(values) == 1 else float("nan")


@pytest.fixture(scope="module")
def engines(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    value = save_model(tmp_path_factory.mktemp("value"), tiny_qwen3(), value=True)
    tree = TreeConfig(mode="tree")
    both = build_engine(model_path, tree=tree), build_engine(value, tree=tree, value=True)
    for engine in both:
        # Adam has state after a step alone.
        for weight in engine.module.parameters():
            weight.grad = torch.zeros_like(weight)
        engine.optimizer.step()
    return both


@pytest.fixture(scope="module")
def saved(engines: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints as verl writes them, and updates after the last."""
    root = tmp_path_factory.mktemp("saved") / "run"
    trainer = Trainer(root, *engines)
    for step in range(1, LAST + 2):
        trainer.train(step)
        if step in STEPS:
            trainer._save_checkpoint()
    return root


@dataclass(frozen=True)
class Run:
    """A copy of them that a job resumes, and what it says."""

    root: Path
    engines: tuple[Any, Any]
    caplog: pytest.LogCaptureFixture

    def resumed(self, **trainer: Any) -> Trainer:
        again = Trainer(self.root, *self.engines, **trainer)
        again._load_checkpoint()
        return again

    def said_of(self, path: Path) -> list[str]:
        return [record.getMessage() for record in self.caplog.records if str(path) in record.getMessage()]


@pytest.fixture
def run(saved: Path, open_folder: Path, engines: Any, caplog: pytest.LogCaptureFixture) -> Run:
    shutil.copytree(saved, open_folder / "run")
    for engine in engines:
        set_weights(engine, -1)
    return Run(open_folder / "run", engines, caplog)


def train_on(trainer: Trainer, *steps: int) -> None:
    trainer.batches = iter(trainer.train_dataloader)
    for step in steps:
        trainer.train(step)


def assert_state_of(trainer: Trainer, step: int) -> None:
    assert trainer.state() == (step, [step, step], step, step / 100, list(range(1, step + 1)))
    assert (trainer._root / TRACKER).read_text() == str(step)


def test_an_undamaged_run_goes_on_from_its_last_checkpoint_and_says_nothing(run: Run) -> None:
    assert_state_of(run.resumed(), LAST)
    assert [record for record in run.caplog.records if record.name.startswith("tree_rl")] == []


@pytest.mark.parametrize("turn", (0, 1))
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(run: Run, damage: str, turn: int) -> None:
    files = sorted(path for path in (run.root / f"global_step_{LAST}").rglob("*") if path.is_file())
    # All files are sealed and judged alike: they share the damages.
    assert len(files) <= 2 * len(DAMAGES)
    path = files[(2 * [*DAMAGES].index(damage) + turn) % len(files)]
    DAMAGES[damage](path)
    assert_state_of(run.resumed(), 4)
    (named,) = run.said_of(path)
    assert "\n" not in named and f"step {LAST} is damaged" in named


@pytest.mark.parametrize(
    ("name", "damage"),
    [*(((TRACKER, LEDGER)[turn % 2], damage) for turn, damage in enumerate(DAMAGES)), (TRACKER, "longer")],
)
def test_a_damaged_tracker_or_ledger_is_named_and_restored(run: Run, name: str, damage: str) -> None:
    DAMAGES[damage](run.root / name)
    assert_state_of(run.resumed(), LAST)
    # What follows the updates until the checkpoint goes anyway.
    assert len(run.said_of(run.root / name)) == (0 if (name, damage) == (LEDGER, "longer") else 1)


def record_of(name: str, size: Any) -> str:
    """A record of one file that fits its own checksum."""
    files = {name: {"bytes": size, "sha256": "0" * 64}}
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    head = {"version": 2, "folder": f"global_step_{LAST}", "is_whole": True}
    return json.dumps({**head, "files": files, "sha256_of_files": digest})


RECORDS = {
    "a number": "7",
    "deep": "[" * 100_000,
    "a huge number": '{"is_whole": ' + "9" * 5000 + "}",
    "files are a list": '{"version": 2, "is_whole": true, "files": ["a"]}',
    "size is negative": record_of("data.pt", -1),
    "size is a truth": record_of("data.pt", True),
    "outside": record_of("../../x", 1),
    "control characters": record_of("a\x1b[2J", 1),
    "another version": '{"version": 3, "is_whole": true, "files": {}}',
    "no version": '{"is_whole": true, "files": {"data.pt": 1}}',
}


def write_record(text: str, root: Path) -> None:
    (root / "global_step_6" / RECORD).write_text(text)


def lose_a_file(root: Path) -> None:
    entries = json.loads((root / "global_step_6" / RECORD).read_text())
    del entries["files"][WEIGHTS]
    write_record(json.dumps(entries), root)


FAULTS: dict[str, Callable[[Path], Any]] = {
    **{f"the record: {what}": partial(write_record, text) for what, text in RECORDS.items()},
    "the record lost a file": lose_a_file,
    **{
        f"of another step: {name}": lambda root, name=name: shutil.copy(
            root / "global_step_4" / name, root / "global_step_6" / name
        )
        for name in (RECORD, WEIGHTS, LEDGER)
    },
    "a whole step under the name of another": lambda root: (
        shutil.rmtree(root / "global_step_6"),
        shutil.copytree(root / "global_step_4", root / "global_step_6"),
    ),
    "critic and actor exchanged": lambda root: (
        (root / "global_step_6/actor").rename(root / "x"),
        (root / "global_step_6/critic").rename(root / "global_step_6/actor"),
        (root / "x").rename(root / "global_step_6/critic"),
    ),
    "another live job writes it": partial(write_record, '{"is_whole": false}'),
    "a link to itself": lambda root: (
        shutil.rmtree(root / "global_step_6"),
        (root / "global_step_6").symlink_to("global_step_6"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_is_not_what_was_saved_is_named_and_not_resumed(run: Run, fault: str) -> None:
    FAULTS[fault](run.root)
    assert_state_of(run.resumed(), 4)
    named = run.said_of(Path("global_step_6"))
    assert named and all(len(one) < 1000 and one.isprintable() for one in named)


@pytest.mark.parametrize("text", ["4", "99", "-6", "٦", "9" * 5000, "6\x1b[2J", "global_step_6"])
def test_a_tracker_that_names_something_else_is_named(run: Run, text: str) -> None:
    (run.root / TRACKER).write_text(text)
    assert_state_of(run.resumed(), LAST)
    (named,) = run.said_of(run.root / TRACKER)
    assert len(named) < 500 and named.isprintable()


def test_training_writes_the_damaged_checkpoint_anew(run: Run) -> None:
    path = run.root / f"global_step_{LAST}" / WEIGHTS
    DAMAGES["folder"](path)
    again = run.resumed()
    train_on(again, 5, LAST)
    again._save_checkpoint()
    assert_state_of(run.resumed(), LAST)
    assert path.is_file() and not path.is_symlink()
    assert (run.root / f"replaced_global_step_{LAST}" / "actor").is_dir()


@pytest.mark.parametrize("back", [0, 2])
def test_a_run_that_goes_back_resumes_from_what_it_saves(run: Run, back: int) -> None:
    path = {"resume_mode": "resume_path", "resume_from_path": str(run.root / f"global_step_{back}")}
    again = run.resumed(max_actor_ckpt_to_keep=1, **(path if back else {"resume_mode": "disable"}))
    assert again.global_steps == back
    train_on(again, *range(back + 1, 4))
    again._save_checkpoint()
    assert_state_of(run.resumed(), 3)
    assert {path.name for path in run.root.glob("global_step_*")} == {"global_step_3"}
    aside = {f"replaced_global_step_{step}" for step in STEPS if step > back}
    assert {path.name for path in run.root.glob("replaced_*")} == aside


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("name", [RECORD, WEIGHTS, "."])
def test_what_may_not_be_read_is_named(run: Run, name: str) -> None:
    for path in [run.root.parent, run.root, *run.root.rglob("*")]:
        os.chown(path, 65534, 65534)
    # What Python imports late may lie where only root reads.
    run.resumed()
    folder = run.root / f"global_step_{LAST}"
    (folder / name).chmod(0)
    run.caplog.clear()
    os.seteuid(65534)
    try:
        assert_state_of(run.resumed(), 4)
    finally:
        os.seteuid(0)
    (named,) = (one for one in run.said_of(folder) if "is damaged" in one)
    assert "Permission denied" in named


class Killed(BaseException):
    """Where a kill would have ended the process."""


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_write_of_a_save_loses_no_checkpoint(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    calls, left = 0, [-1]
    while left[0] < 0:
        copied = replace(run, root=tmp_path / str(calls))
        shutil.copytree(run.root, copied.root)
        shutil.rmtree(copied.root / f"global_step_{LAST}")
        again = copied.resumed(max_actor_ckpt_to_keep=1)
        train_on(again, 5, LAST)
        with monkeypatch.context() as patch:
            left = killed_after(calls, patch)
            with contextlib.suppress(Killed):
                again._save_checkpoint()
        resumed_again = copied.resumed()
        assert_state_of(resumed_again, resumed_again.global_steps)
        assert resumed_again.global_steps in (4, LAST)
        shutil.rmtree(copied.root)
        calls += every
    assert calls > 20 + every and resumed_again.global_steps == LAST


def killed_after(calls: int, patch: pytest.MonkeyPatch) -> list[int]:
    """End what runs before the call of that number which makes something last; how many are left, negative if ended."""
    left = [calls]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return call(*args)

        return count

    # The disk need not be waited for: what was written is there for the process that resumes.
    patch.setattr(os, "fsync", counted(lambda descriptor: None))
    for place, name in ((Path, "replace"), (Path, "rename"), (checkpoint_commit, "remove_tree")):
        patch.setattr(place, name, counted(getattr(place, name)))
    return left


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"max_actor_ckpt_to_keep": 1}, 1),
        ({"max_critic_ckpt_to_keep": 1}, 3),
        ({"max_actor_ckpt_to_keep": -1, "max_critic_ckpt_to_keep": -1}, 3),
    ],
)
def test_callbacks_get_whole_checkpoints_and_only_as_many_stay_as_asked_for_the_actor(
    tmp_path: Path, engines: Any, asked: dict[str, int], kept: int
) -> None:
    trainer = Trainer(tmp_path, *engines, **asked)
    uploaded: list[int] = []

    def on_save(*, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool) -> None:
        record = read_record(Path(checkpoint_dir))
        assert record is not None and record.is_whole and STATE in record.files and not async_save
        uploaded.append(global_step)

    trainer.checkpoint_callback.on_save = on_save
    for number, step in enumerate(STEPS, 1):
        trainer.train(step)
        trainer._save_checkpoint()
        left = [*tmp_path.glob("*global_step_*")]
        assert {path.name for path in left} == {f"global_step_{step}" for step in STEPS[:number][-kept:]}
        assert all((path / "actor").is_dir() for path in left)
    assert uploaded == list(STEPS) and asked.items() <= trainer.config.trainer.items()


def test_checkpoints_behind_links_are_resumed_and_written_beside(run: Run, tmp_path: Path) -> None:
    """Users move checkpoints to another disk, and the whole folder too."""
    elsewhere = tmp_path / "disk"
    run.root.rename(elsewhere)
    run.root.symlink_to(elsewhere)
    (elsewhere / "global_step_6").rename(tmp_path / "kept")
    (elsewhere / "global_step_6").symlink_to(tmp_path / "kept")
    again = run.resumed()
    assert_state_of(again, LAST)
    (elsewhere / "global_step_7").symlink_to(tmp_path / "kept")
    before = {path: path.read_bytes() for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    train_on(again, 7)
    again._save_checkpoint()
    assert all(path.read_bytes() == content for path, content in before.items())
    assert_state_of(run.resumed(), 7)


def test_without_a_whole_checkpoint_nothing_trains(run: Run) -> None:
    for step in STEPS:
        change_a_byte(run.root / f"global_step_{step}" / WEIGHTS)
    ledger = (run.root / LEDGER).read_bytes()
    with pytest.raises(ValueError, match="no checkpoint is whole") as refused:
        run.resumed()
    message = str(refused.value)
    assert "trainer.default_local_dir" in message and "trainer.resume_mode" in message and "\n" not in message
    assert all(f"global_step_{step}/{WEIGHTS}" in message for step in STEPS)
    assert (run.root / LEDGER).read_bytes() == ledger and (run.root / TRACKER).exists()


def test_a_tracker_without_any_checkpoint_is_no_fresh_start_and_an_empty_folder_is_one(run: Run) -> None:
    for step in STEPS:
        shutil.rmtree(run.root / f"global_step_{step}")
    with pytest.raises(ValueError, match=r"latest_checkpointed_iteration.txt holds '6', and no such checkpoint"):
        run.resumed()
    assert run.resumed(resume_mode="disable").global_steps == 0
    assert replace(run, root=run.root / "new").resumed().global_steps == 0


@pytest.mark.parametrize(("name", "damage"), [(RECORD, "missing"), (WEIGHTS, "changed")])
def test_a_damaged_checkpoint_that_was_asked_for_is_refused_by_name(run: Run, name: str, damage: str) -> None:
    folder = run.root / f"global_step_{LAST}"
    DAMAGES[damage](folder / name)
    asked = {"resume_mode": "resume_path", "resume_from_path": str(folder)}
    with pytest.raises(ValueError, match=r"trainer.resume_from_path=.*expected a whole checkpoint") as refused:
        run.resumed(**asked)
    assert str(folder / name) in str(refused.value)
    again = run.resumed(**{**asked, "resume_from_path": str(run.root / "global_step_4")})
    assert again.state() == (4, [4, 4], 4, 0.04, [1, 2, 3, 4])


@pytest.mark.parametrize("path", [None, "global_step_x", "global_step_4/actor", 7])
def test_a_path_that_names_no_checkpoint_is_refused(run: Run, path: Any) -> None:
    with pytest.raises(ValueError, match=r"trainer.resume_from_path=.*global_step_20"):
        run.resumed(resume_mode="resume_path", resume_from_path=path)


def test_a_checkpoint_of_another_number_of_ranks_is_refused(run: Run) -> None:
    again = Trainer(run.root, *run.engines)
    again.actor_rollout_wg.world_size = 4
    with pytest.raises(ValueError, match=r"actor was saved by 1 ranks, and this job has 4"):
        again._load_checkpoint()


@pytest.mark.parametrize(
    ("name", "damage"),
    [("", ""), (WEIGHTS, "changed"), ("data.pt", "zeros"), ("critic/optim_world_size_1_rank_0.pt", "missing")],
)
def test_checkpoints_of_stock_verl_load_with_a_warning_and_damage_shows(run: Run, name: str, damage: str) -> None:
    for path in [*run.root.rglob("tree_*.json"), *run.root.rglob(LEDGER)]:
        path.unlink()
    (run.root / LEDGER).write_bytes(b"")
    path, step = run.root / f"global_step_{LAST}" / name, 4 if name else LAST
    if name:
        DAMAGES[damage](path)
    assert run.resumed().state()[:3] == (step, [step, step], step)
    if name:
        assert run.said_of(path)
    else:
        assert sum("only" in record.getMessage() for record in run.caplog.records) == 1
