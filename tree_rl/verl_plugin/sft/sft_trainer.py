"""verl's SFT trainer on the tree engine, with verl's `sft_loss`; batches keep the rows of a conversation together."""

import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.workers.config import TrainingWorkerConfig

from tree_rl.inspection.files import InputError, RowFileError
from tree_rl.inspection.files.quoting import escaped
from tree_rl.inspection.files.terminal import INPUT_ERROR
from tree_rl.verl_plugin import compat
from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.options import PATH_WEIGHT_COLUMNS, TREE_LANGUAGE_MODEL, TreeFSDPEngineConfig
from tree_rl.verl_plugin.sft.checked_data import check_rows, group_rows, readable_files, row_weights
from tree_rl.verl_plugin.sft.conversations import CONVERSATION, ConversationSampler, conversations_of_rows
from tree_rl.verl_plugin.sft.dry_pass import refuse_unusable_rows
from tree_rl.verl_plugin.trainer.step_metrics import reduce_engine_metrics
from tree_rl.verl_plugin.trainer.workers import TreeTrainingWorker

Batch = dict[str, Any]


class SFTWorker(TreeTrainingWorker):
    """Converts the engine's metrics to numbers, because verl's SFT loop logs metrics unchanged."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: TensorDict) -> TensorDict:
        output = super().train_batch(data)
        if output is not None:
            reduce_engine_metrics(tu.get(output, "metrics"))
        return output


class TreeSFTTrainer(compat.SFTTrainer):
    """verl's SFT trainer on the tree engine, unless `model.model_type` names another engine."""

    loss_fn: Callable[..., Any]
    title = "tree SFT"
    """Beginning of its messages."""
    train_dataset: Any
    """verl's dataset, or ours; with `path_weighting: custom` its rows have weights."""

    def _build_engine(self) -> None:
        self.loss_fn = partial(compat.sft_loss, config=None)
        self.training_client = SFTWorker(
            TrainingWorkerConfig(
                model_type=self.config.model.get("model_type", None) or TREE_LANGUAGE_MODEL,
                model_config=self.model_config,
                engine_config=self.engine_config,
                optimizer_config=self.optimizer_config,
                checkpoint_config=self.checkpoint_config,
                profiler_config=self.profiler_config,
            )
        )
        self.training_client.set_loss_fn(loss_fn=self.loss_fn)
        self.engine = self.training_client.engine

    def fit(self) -> None:
        """Run verl's loop; after a checkpoint at the end of an epoch, start the next epoch."""
        step = self.resume_global_step
        if step >= self.total_training_steps:
            if self.rank == 0:
                longer = "raise trainer.total_epochs (or trainer.total_training_steps) to go on"
                print(f"{self.title}: all {self.total_training_steps} steps are trained; {longer}")
            return
        if step % self.steps_per_epoch == 0:
            # verl saves in the epoch's last step, so the loader's state has no batch left. verl would take that empty
            # rest for the next epoch (verl#7401).
            self.train_dataloader.next_iter_state = None
        super().fit()

    def _build_dataset(self) -> None:
        """Build and check the data set before the engine, so that a mistake in the data uses no GPU."""
        data = self.config.data
        with readable_files(data):
            super()._build_dataset()
        vocab_size, max_positions = self._limits()
        for key, dataset in (("train_files", self.train_dataset), ("val_files", self.val_dataset)):
            if dataset is not None:
                check_rows(dataset, data, key=key)
                refuse_unusable_rows(
                    dataset,
                    data,
                    key=key,
                    vocab_size=vocab_size,
                    on_trees=self._runs_trees(),
                    max_positions=max_positions,
                )
        self.group_of_row = group_rows(self.train_dataset, data.get("group_key", None))
        engine, weights = self.engine_config, None
        if isinstance(engine, TreeFSDPEngineConfig) and engine.tree.path_weighting == "custom":
            weights = row_weights(self.train_dataset, engine.tree.custom_weights)
        self.train_dataset = MarkedRows(self.train_dataset, group_of_row=self.group_of_row, weight_of_row=weights)

    def _limits(self) -> tuple[int, int | None]:
        """The model's number of token ids, and of positions if they have a limit."""
        settings = self.model_config.hf_config.get_text_config()
        return settings.vocab_size, settings.to_dict().get("max_position_embeddings")

    def _runs_trees(self) -> bool:
        """False where verl's own forward runs the rows."""
        engine = self.engine_config
        is_ours = (self.config.model.get("model_type", None) or TREE_LANGUAGE_MODEL) == TREE_LANGUAGE_MODEL
        return is_ours and isinstance(engine, TreeFSDPEngineConfig) and engine.tree.mode != "flat"

    def _build_dataloader(self) -> None:
        ranks, rows = self.engine.get_data_parallel_size(), self.config.data.train_batch_size
        if rows < ranks:
            raise RowFileError(
                f"data.train_batch_size={rows}: expected at least one for each of {ranks} ranks; raise it"
            )
        super()._build_dataloader()
        self.collate_fn = self._collator()
        if self.group_of_row is not None:
            self.train_sampler = ConversationSampler(
                self.group_of_row,
                batch_rows=self.train_batch_size_per_dp,
                num_replicas=self.engine.get_data_parallel_size(),
                rank=self.engine.get_data_parallel_rank(),
                shuffle=True,
                seed=self.config.trainer.seed,
            )
            self.train_dataloader = StatefulDataLoader(
                dataset=self.train_dataset,
                batch_size=self.train_batch_size_per_dp,
                sampler=self.train_sampler,
                num_workers=self.config.data.num_workers,
                drop_last=True,
            )
        self.train_dataloader.collate_fn = self.collate_fn
        if self.val_dataset:
            self.val_dataloader.collate_fn = self.collate_fn

    def _collator(self) -> Callable[[list[Any]], Batch]:
        return partial(collate_with_uid, self.collate_fn)


class MarkedRows(Dataset):
    """A dataset whose rows also have the name of their conversation and their weight in the loss, where given."""

    def __init__(
        self, rows: Any, *, group_of_row: np.ndarray | None = None, weight_of_row: np.ndarray | None = None
    ) -> None:
        self._rows, self._group_of_row, self._weight_of_row = rows, group_of_row, weight_of_row

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        row = dict(self._rows[index])
        if self._weight_of_row is not None:
            length, weight = len(row["input_ids"]), self._weight_of_row[index]
            row[PATH_WEIGHT_COLUMNS["custom"]] = torch.full((length,), weight, dtype=torch.float64)
        if self._group_of_row is not None:
            row[CONVERSATION] = f"conversation {self._group_of_row[index]}"
        return row


def collate_with_uid(collate: Callable[[list[Batch]], Batch], rows: list[Batch]) -> Batch:
    """Collate as verl does, and add each row's conversation, by which the engine builds trees.

    Rows without a name of theirs are in one conversation if they share much of their beginning.
    """
    batch = collate([{name: value for name, value in row.items() if name != CONVERSATION} for row in rows])
    names = [row.get(CONVERSATION) for row in rows]
    if None in names:
        names = [f"conversation {one}" for one in conversations_of_rows([row["input_ids"].numpy() for row in rows])]
    batch["uid"] = torch.stack([NonTensorData(name) for name in names], dim=0)
    return batch


def join_as_only_rank() -> None:
    """Without torchrun, set the environment of a world of one process."""
    if "RANK" in os.environ:
        return
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address, port = sock.getsockname()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": address, "MASTER_PORT": str(port)}


def train(config: DictConfig, trainer_class: type[TreeSFTTrainer] = TreeSFTTrainer) -> None:
    """Run one process of a job; if its data cannot train, print one line and exit with code 2."""
    join_as_only_rank()
    config.trainer.device = compat.get_device_name()
    compat.initialize_global_process_group()
    try:
        trainer = trainer_class(config=config)
    except InputError as error:
        print(f"{trainer_class.title}: {escaped(str(error))}", file=sys.stderr)
        sys.exit(INPUT_ERROR)
    trainer.fit()
    compat.destroy_global_process_group()
