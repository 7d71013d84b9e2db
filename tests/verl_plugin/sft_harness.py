"""verl's SFT trainer in this process: its config on a CPU, the files that it reads, and what a run leaves."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from verl.utils import tensordict_utils as tu

CPU = ["machine=sft_cpu", "trainer.device=cpu", "trainer.resume_mode=disable", "data.num_workers=0"]
OF_TOKENS = ("path=pkg://tree_rl.verl_plugin.sft.token_rows_dataset", "name=TokenRowsDataset")
TOKEN_ROWS = [f"data.custom_cls.{option}" for option in OF_TOKENS]


def sft_config(*overrides: str) -> DictConfig:
    with initialize_config_module("tree_rl.verl_plugin.config", version_base=None):
        return compose("tree_sft_trainer", overrides=[*CPU, *overrides])


def write(path: Path, **columns: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def fitted(trainer: Any) -> list[dict[str, Any]]:
    """Train to the end; metrics of every step, and the token ids of its `rows`."""
    steps: list[dict[str, Any]] = []
    train_batch = trainer.training_client.train_batch

    def keep_metrics(data: Any) -> Any:
        rows = [row.tolist() for row in data["input_ids"].unbind()]
        output = train_batch(data)
        steps.append({**tu.get(output, "metrics"), "rows": rows})
        return output

    trainer.training_client.train_batch = keep_metrics
    trainer.fit()
    return steps
