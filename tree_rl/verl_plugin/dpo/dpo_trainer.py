"""verl's SFT loop with a preference loss: whole pairs on a rank, the pairs of a prompt in one tree.

The reference is the model before the first step; with LoRA, the model without adapters. At each start, before a
checkpoint is loaded, one pass without gradients computes its log-prob of every row, so no second model is kept.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from tree_rl.inspection.files import InputError, RowFileError
from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.dpo.preference_rows import PreferenceRows, read_preferences
from tree_rl.verl_plugin.engine.pair_loss import PLACE, REFERENCE, PairLoss, log_probs_of_rows
from tree_rl.verl_plugin.sft.checked_data import refuse_less_than_a_batch
from tree_rl.verl_plugin.sft.sft_trainer import Batch, TreeSFTTrainer, collate_with_uid


class TreeDPOTrainer(TreeSFTTrainer):
    """verl's SFT trainer with `PairLoss`; `data.train_batch_size` counts pairs."""

    title = "tree DPO"

    def _build_engine(self) -> None:
        super()._build_engine()
        self.loss_fn = PairLoss(**OmegaConf.to_container(self.config.dpo, resolve=True))
        self.training_client.set_loss_fn(loss_fn=self.loss_fn)

    def _build_dataset(self) -> None:
        """Read all pairs before the engine, so that a mistake in the data uses no GPU."""
        data = self.config.data
        self.train_dataset, self.val_dataset = self._read("train"), self._read("val") if data.val_files else None
        self.group_of_row = self.train_dataset.group_of_pair
        for key, dataset in (("train_files", self.train_dataset), ("val_files", self.val_dataset)):
            if dataset is not None:
                refuse_less_than_a_batch(dataset, data, key=key, what="pairs")

    def _read(self, name: str) -> PreferenceRows:
        data = self.config.data
        files = data[f"{name}_files"]
        vocab_size, max_positions = self._limits()
        try:
            return read_preferences(
                files if isinstance(files, str) else list(files),
                self.model_config.tokenizer,
                data,
                vocab_size=vocab_size,
                max_positions=max_positions,
                max_samples=data.get(f"{name}_max_samples", -1),
            )
        except InputError as error:
            raise RowFileError(f"data.{name}_files: {error}") from error

    def _build_dataloader(self) -> None:
        ranks, pairs = self.engine.get_data_parallel_size(), self.config.data.train_batch_size
        if pairs % ranks:
            raise RowFileError(f"data.train_batch_size={pairs}: expected a multiple of the {ranks} data-parallel ranks")
        super()._build_dataloader()

    def _collator(self) -> Callable[[list[Any]], Batch]:
        return partial(collate_pairs, self.collate_fn)

    def _init_engine(self) -> None:
        """Initialise the engine, and compute the reference's log-probs while it has the initial weights."""
        super()._init_engine()
        if self.config.dpo.reference_free:
            return
        for dataset in (self.train_dataset, self.val_dataset):
            if dataset is not None:
                dataset.reference = self._reference(dataset)

    def _reference(self, dataset: PreferenceRows) -> torch.Tensor:
        """float64 [pairs, 2], log-probs of all rows without gradients; collective."""
        data, per_rank = self.config.data, self.train_batch_size_per_dp
        ranks, rank = self.engine.get_data_parallel_size(), self.engine.get_data_parallel_rank()
        calls = -(-len(dataset) // (per_rank * ranks))
        # The last call repeats pairs, because all ranks call the engine equally often.
        order = np.resize(np.argsort(dataset.group_of_pair, kind="stable"), (calls, ranks, per_rank))
        mine: list[tuple[np.ndarray, torch.Tensor]] = []
        flags = {
            "use_dynamic_bsz": data.use_dynamic_bsz,
            "max_token_len_per_gpu": data.max_token_len_per_gpu,
            "micro_batch_size_per_gpu": data.micro_batch_size_per_gpu,
            "temperature": 1.0,
            "compute_loss": False,
            "no_lora_adapter": self._get_lora_train_meta() is not None,
        }
        for pairs in order[:, rank]:
            batch = tu.get_tensordict(
                self.collate_fn([dataset[pair] for pair in pairs.tolist()]), non_tensor_dict=flags
            )
            output = self.training_client.infer_batch(batch)
            # Of ranks that share rows, one has the outputs.
            if self.engine.is_mp_src_rank_with_outputs():
                found_B = log_probs_of_rows(output["log_probs"], batch["loss_mask"].cpu())
                mine.append((pairs, found_B.reshape(-1, 2)))
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, mine)
        reference = torch.empty(len(dataset), 2, dtype=torch.float64)
        for pairs, found_P2 in (one for of_rank in gathered for one in of_rank):
            reference[torch.from_numpy(pairs)] = found_P2
        return reference


def collate_pairs(collate: Callable[[list[Batch]], Batch], pairs: list[list[Batch]]) -> Batch:
    """Rows of the pairs, chosen before rejected, in verl's form; a group's rows are one `uid`."""
    rows = [row for pair in pairs for row in pair]
    known = [row.pop(REFERENCE) for row in rows if REFERENCE in row]
    batch = collate_with_uid(collate, rows)
    batch[PLACE] = torch.arange(len(rows))
    return {**batch, REFERENCE: torch.stack(known)} if known else batch
