"""verl's SFT trainer in this process: its config on a CPU, the files that it reads, and what a run leaves."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

CPU = ["machine=sft_cpu", "trainer.device=cpu", "trainer.resume_mode=disable", "data.num_workers=0"]
TOKEN_ROWS = [
    "data.custom_cls.path=pkg://tree_rl.verl_plugin.sft.token_rows_dataset",
    "data.custom_cls.name=TokenRowsDataset",
]


def sft_config(*overrides: str) -> DictConfig:
    """Of tree SFT on a CPU."""
    with initialize_config_module("tree_rl.verl_plugin.config", version_base=None):
        return compose("tree_sft_trainer", overrides=[*CPU, *overrides])


def write(path: Path, **columns: Any) -> Path:
    """A parquet file."""
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path
