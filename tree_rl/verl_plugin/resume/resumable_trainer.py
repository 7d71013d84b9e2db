"""A trainer that a restart continues exactly, and that ends when a process of its job dies.

It resumes only from whole checkpoints, derives a prompt's uid from step and place, sorts the rows of an update, and
records trained rows in a ledger.
"""

import functools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict

from tree_rl.verl_plugin import compat
from tree_rl.verl_plugin.agent_loops.tree_dump import set_aside_later_trees
from tree_rl.verl_plugin.compat import KVBatchMeta, PPOTrainer
from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.compat import transfer_queue as tq
from tree_rl.verl_plugin.resume.checkpoint_commit import (
    FOLDER,
    begin_checkpoint,
    commit_checkpoint,
    folder_of_step,
    remove_old_checkpoints,
    set_aside_later_checkpoints,
)
from tree_rl.verl_plugin.resume.checkpoint_parts import (
    Part,
    refusal,
    refuse_damaged,
    seal_checkpoint,
    why_checkpoint_damaged,
)
from tree_rl.verl_plugin.resume.checkpoint_record import STATE, read_record, write_atomically
from tree_rl.verl_plugin.resume.choose_checkpoint import choose_checkpoint
from tree_rl.verl_plugin.resume.liveness import Watch
from tree_rl.verl_plugin.resume.row_names import prompt_uid, row_place, uid_of_row
from tree_rl.verl_plugin.resume.update_ledger import record_update, restore_ledger, save_ledger

KEEP_KEYS = ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep")
REMOVE_KEY = "remove_previous_ckpt_in_save"
NO_ROWS = "all sessions failed, so there are no rows; their errors are above, in the lines of the agent loop workers"


class ResumableTrainer(PPOTrainer):
    """A mix-in that comes before one of verl's V1 trainers among the base classes."""

    _prompts_fetched = (0, 0)
    """A step, and the number of prompts fetched in it."""
    _continued_from: int | None = None
    """Step from which training continued; None once a checkpoint has been saved since."""
    _row_tokens: dict[str, np.ndarray]
    """Token ids of the rows of the current update, by verl's key."""

    def __init__(self, config: DictConfig) -> None:
        if config.trainer.resume_mode == "resume_path":
            refuse_damaged(self._asked_folder(config))
        super().__init__(config)

    @property
    def _root(self) -> Path:
        return Path(self.config.trainer.default_local_dir).absolute()

    def fit(self, agent_loop_manager: Any) -> None:
        """Train as verl does, and watch the processes that produce rows."""
        self._watch.actors.update(self._row_makers(agent_loop_manager))
        with self._watch.guard():
            super().fit(agent_loop_manager)

    def _build_replay_buffer(self) -> Any:
        """verl's buffer, which raises if a process that produces rows has died, and returns rows in a fixed order."""
        self._watch = Watch({})
        buffer = super()._build_replay_buffer()
        poll = buffer._sync_metadata_from_transfer_queue

        def poll_while_all_live() -> None:
            self._watch.check()
            poll()

        buffer._sync_metadata_from_transfer_queue = poll_while_all_live
        sample = buffer.sample

        @functools.wraps(sample)
        def sample_in_order(*args: Any, **kwargs: Any) -> Any:
            batch, metrics = sample(*args, **kwargs)
            self._watch.confirm()
            if not batch.keys:
                raise RuntimeError(f"step {self.global_steps}: {NO_ROWS}")
            # verl's order depends on hashes and time. Sorted by key, a repeated update sums rows in the same order.
            batch.reorder(sorted(range(len(batch.keys)), key=lambda row: row_place(batch.keys[row])))
            return batch, metrics

        buffer.sample = sample_in_order
        return buffer

    def _row_makers(self, agent_loop_manager: Any) -> dict[str, Any]:
        """Every process whose death would lose rows."""
        groups = {
            "agent loop worker": _actors_of(agent_loop_manager),
            "reward worker": self.get_reward_handles() or [],
            "rollout server": [
                server
                for manager in self._rollout_server_managers()
                for replica in manager.get_replicas()
                for server in replica.servers
            ],
            "training worker": self.actor_rollout_wg.workers,
            "storage of the rows' queue": (compat._TQ_STORAGE or {}).get("SimpleStorage", {}).values(),
        }
        makers = {f"{kind} {rank}": handle for kind, handles in groups.items() for rank, handle in enumerate(handles)}
        makers["controller of the rows' queue"] = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        return makers

    def _fetch_one_gen_batch(self) -> TensorDict:
        """verl's prompts, but with uids derived from step and place instead of random ones."""
        batch = super()._fetch_one_gen_batch()
        step, fetched = self._prompts_fetched
        first = fetched if step == self.global_steps else 0
        places = range(first, first + len(batch))
        tu.assign_non_tensor_stack(batch, "uid", [prompt_uid(self.global_steps, place) for place in places])
        self._prompts_fetched = (self.global_steps, places.stop)
        return batch

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        batch = super()._step_once(metrics, timing_raw, sample_batch_size)
        keys = sorted(self._row_tokens)
        # Not all rollout managers write the field `index`, but verl's data set gives every prompt `extra_info`.
        rows = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["extra_info"])
        infos = tu.get(rows, "extra_info", None) or [{}] * len(keys)
        index_of_uid = {uid_of_row(key): info.get("index", 0) for key, info in zip(keys, infos, strict=True)}
        record_update(self._root, self.global_steps, self.local_trigger_step, self._row_tokens, index_of_uid)
        return batch

    def _save_checkpoint(self) -> None:
        """Save verl's checkpoint, and commit it once all of it is on the disk; then call the user's callback."""
        if self._continued_from is not None:
            set_aside_later_checkpoints(self._root, self._continued_from)
            self._continued_from = None
        folder = begin_checkpoint(self._root, self.global_steps)
        callback: Any = self.checkpoint_callback  # type: ignore[has-type]
        self.checkpoint_callback = compat.CheckpointCallback()
        with self._no_checkpoint_deleted() as keep:
            super()._save_checkpoint()
        self.checkpoint_callback = callback
        penalised = self.config.algorithm.use_kl_in_reward
        state = {"kl_coefficient": self.kl_ctrl_in_reward.value} if penalised else {}
        write_atomically(folder / STATE, json.dumps(state).encode())
        save_ledger(self._root, folder)
        commit_checkpoint(self._root, self.global_steps, seal_checkpoint(folder, self._checkpoint_parts()))
        place = os.path.join(self.config.trainer.default_local_dir, folder.name)
        callback.on_save(trainer=self, global_step=self.global_steps, checkpoint_dir=place, async_save=False)
        if keep:
            remove_old_checkpoints(self._root, keep)

    @contextmanager
    def _no_checkpoint_deleted(self) -> Iterator[int]:
        """Keep verl from deleting a worker's previous checkpoint before the next one is whole.

        Yields the number of whole checkpoints that the config keeps, 0 for all: the actor's, or the critic's if more.
        """
        trainer = self.config.trainer
        asked = {key: trainer.get(key, None) for key in (*KEEP_KEYS, REMOVE_KEY)}
        with open_dict(self.config):
            trainer.update({**dict.fromkeys(KEEP_KEYS), REMOVE_KEY: False})
            # As for verl, a number below 1 keeps all.
            of_actor, of_critic = (max(asked[key] or 0, 0) for key in KEEP_KEYS)
            yield 1 if asked[REMOVE_KEY] else of_actor and max(of_actor, of_critic)
            trainer.update(asked)

    def _load_checkpoint(self) -> None:
        """Resume as verl does, but from a whole checkpoint; removes later steps from the ledger and the dumps."""
        folder = self._whole_checkpoint()
        super()._load_checkpoint()
        restore_ledger(self._root, self.global_steps, folder)
        self._continued_from = self.global_steps
        dumps = (self.config.actor_rollout_ref.rollout.get("custom") or {}).get("tree_dump_dir")
        if dumps:
            set_aside_later_trees(Path(dumps), self.global_steps)
        if folder is not None and self.config.algorithm.use_kl_in_reward and (folder / STATE).exists():
            state = json.loads((folder / STATE).read_text())
            self.kl_ctrl_in_reward.value = state.get("kl_coefficient", self.kl_ctrl_in_reward.value)

    def _whole_checkpoint(self) -> Path | None:
        """The undamaged checkpoint that verl is about to load; None if it loads nothing."""
        mode = self.config.trainer.resume_mode
        parts = self._checkpoint_parts() if mode != "disable" else []
        if mode == "resume_path":
            folder = self._asked_folder(self.config)
            refuse_damaged(folder)
            reason = why_checkpoint_damaged(folder, read_record(folder), parts)
            if reason is not None:
                raise refusal(folder, reason)
            return folder
        if mode != "auto":
            return None
        step = choose_checkpoint(self._root, lambda folder, record: why_checkpoint_damaged(folder, record, parts))
        return None if step is None else folder_of_step(self._root, step)

    def _checkpoint_parts(self) -> list[Part]:
        actor = self.config.actor_rollout_ref.actor
        parts = [Part(folder="actor", workers=self.actor_rollout_wg, contents=actor.checkpoint.load_contents)]
        if self.use_critic:
            contents = self.config.critic.checkpoint.load_contents
            parts.append(Part(folder="critic", workers=self.critic_wg, contents=contents))
        return parts

    @staticmethod
    def _asked_folder(config: DictConfig) -> Path:
        """The folder in `trainer.resume_from_path`; raises a ValueError if its name is not a checkpoint's."""
        path = config.trainer.resume_from_path
        if not isinstance(path, str) or FOLDER.fullmatch(os.path.basename(path)) is None:
            raise ValueError(
                f"trainer.resume_from_path={path}: expected the folder of a checkpoint, such as .../global_step_20, as "
                "trainer.resume_mode=resume_path"
            )
        return Path(path).absolute()


def _actors_of(agent_loop_manager: Any) -> list[Any]:
    """The actors that run agents; for managers that are not verl's, every actor among their attributes."""
    if isinstance(agent_loop_manager, compat.AgentLoopManagerTQ):
        return list(agent_loop_manager.agent_loop_workers)
    return [held for held in vars(agent_loop_manager).values() if isinstance(held, ray.actor.ActorHandle)]
