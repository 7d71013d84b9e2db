"""A resumed RL trainer fetches the prompts that the uninterrupted one fetched, also behind the end of an epoch."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from local_trainer import config_of_mode
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_sampler

# verl's trainer loads the plugin, and with it the module below.
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu

from tree_rl.verl_plugin.resume.resumable_trainer import ResumableTrainer
from tree_rl.verl_plugin.trainer.prepared_config import prepare_config

EPOCHS = 3


def prompts_of(rows: list[int]) -> dict[str, np.ndarray]:
    return {"raw_prompt": np.array([str(row) for row in rows], dtype=object)}


class Trainer(ResumableTrainer):
    """The base class of all tree trainers, synchronous and asynchronous; it fetches prompts alone."""

    on_step_end = on_sample_end = lambda self: None

    def __init__(self, *, prompts: int, batch: int, workers: int, shuffle: bool) -> None:
        rows = list(range(prompts))
        sampler = create_rl_sampler(OmegaConf.create({"shuffle": shuffle, "seed": 1}), rows)
        given = {"batch_size": batch, "num_workers": workers, "collate_fn": prompts_of, "sampler": sampler}
        self.train_dataloader = StatefulDataLoader(rows, drop_last=True, **given)
        self.train_dataloader_it = None
        self.global_steps = 1

    def fetch(self) -> list[str]:
        return [str(prompt) for prompt in tu.get(self._fetch_one_gen_batch(), "raw_prompt")]


@pytest.mark.parametrize(
    ("loader", "places"),
    [
        # Every place of three epochs: a batch of prompts at a time as the synchronous trainer, or one as the others.
        ({"prompts": 6, "batch": 2, "workers": 0, "shuffle": True}, range(1, 9)),
        ({"prompts": 7, "batch": 2, "workers": 0, "shuffle": False}, range(1, 9)),
        ({"prompts": 3, "batch": 1, "workers": 0, "shuffle": True}, range(1, 9)),
        # Processes that read ahead: the end of the first epoch.
        ({"prompts": 6, "batch": 2, "workers": 2, "shuffle": True}, (3,)),
    ],
)
def test_prompts_go_on_behind_every_place(loader: dict[str, Any], places: Any) -> None:
    trainer = Trainer(**loader)
    fetched, states = [], []
    for _ in range(EPOCHS * len(trainer.train_dataloader)):
        fetched.append(trainer.fetch())
        states.append(copy.deepcopy(trainer.train_dataloader.state_dict()))
    for place in places:
        resumed = Trainer(**loader)
        resumed.train_dataloader.load_state_dict(states[place - 1])
        assert [resumed.fetch() for _ in fetched[place:]] == fetched[place:], place


def test_a_batch_of_failed_sessions_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(prompts=1, batch=1, workers=0, shuffle=False)
    keys: list[str] = []
    batch = SimpleNamespace(keys=keys, reorder=keys.sort)
    buffer = SimpleNamespace(sample=lambda **_: (batch, {}), _sync_metadata_from_transfer_queue=lambda: None)
    monkeypatch.setattr(PPOTrainer, "_build_replay_buffer", lambda self: buffer)
    with pytest.raises(RuntimeError, match=r"^step 1: all sessions failed, so there are no rows"):
        trainer._build_replay_buffer().sample(partition_id="val")


def test_a_run_that_is_resumed_twice_goes_on() -> None:
    loader = {"prompts": 6, "batch": 2, "workers": 0, "shuffle": True}
    trainer = Trainer(**loader)
    fetched = [trainer.fetch() for _ in range(9)]
    for first, second in ((3, 6), (2, 3), (3, 4), (4, 6)):
        trainer = Trainer(**loader)
        for place in range(second):
            if place == first:
                state = copy.deepcopy(trainer.train_dataloader.state_dict())
                trainer = Trainer(**loader)
                trainer.train_dataloader.load_state_dict(state)
            trainer.fetch()
        resumed = Trainer(**loader)
        resumed.train_dataloader.load_state_dict(trainer.train_dataloader.state_dict())
        assert [resumed.fetch() for _ in range(second, 9)] == fetched[second:]


@pytest.mark.parametrize("path", ["/runs/global_step_4/", "~/global_step_4"])
def test_a_path_may_end_with_the_slash_of_a_shell_or_begin_at_home(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl reads the step behind `global_step_`."""
    monkeypatch.setenv("HOME", "/runs")
    config = config_of_mode("tree_sync", f"trainer.resume_from_path={path}")
    prepare_config(config)
    assert config.trainer.resume_from_path == "/runs/global_step_4"
