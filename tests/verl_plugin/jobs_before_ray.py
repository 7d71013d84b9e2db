"""Command lines of tree training, checked in this process as the driver checks them before Ray starts."""

import copy
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import hydra
import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig
from safetensors.numpy import save_file

from tree_rl.verl_plugin.launch import train
from tree_rl.verl_plugin.launch.command_line import read_job

TREE = "trainer.v1.trainer_mode=tree_sync"
QWEN = '{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}'


def write_job(folder: Path) -> list[str]:
    """A stock config's command line that a machine without an accelerator runs; its model has no weights to load."""
    pq.write_table(pa.table({"prompt": [[{"role": "user", "content": "a"}]] * 1024}), folder / "rows.parquet")
    (folder / "config.json").write_text(QWEN)
    (folder / "tokenizer.json").write_text("{}")
    save_file({}, folder / "model.safetensors")
    files = [f"data.{name}_files={folder}/rows.parquet" for name in ("train", "val")]
    models = [f"{role}.path={folder}" for role in ("actor_rollout_ref.model", "critic.model")]
    return [TREE, "machine=cpu", "algorithm.adv_estimator=grpo", *files, *models]


def checked(*arguments: str) -> tuple[Any, str]:
    """The config of a command line, completed, and the banner."""
    config, given = read_job(arguments, train.PROGRAM)
    return config, train.checked(config, given)


def assert_names(line: str, overrides: Sequence[str], *said: str) -> None:
    """A short line that names one of the overrides by key and value, and what else it must say."""
    assert "\n" not in line and len(line) < 500
    assert any(_names(line, *one.strip("'+").partition("=")[::2]) for one in overrides), line
    for part in said:
        assert part in line


def _names(line: str, key: str, value: str) -> bool:
    """The key's last two parts with the value, if there is one, or the section that the key stands in."""
    short, name = ".".join(key.split(".")[-2:]), key.rpartition(".")[2]
    sections = accumulate(key.split("."), "{}.{}".format)
    told = value.strip("[]'\"").lower().replace("null", "none") in line.lower()
    return (short in line and (told or f"{name}=" not in line)) or any(f"{section}: " in line for section in sections)


def composed_once(name: str, overrides: list[str]) -> DictConfig:
    """Hydra's `compose`, which takes a second for the same overrides each time."""
    return copy.deepcopy(_composed(name, *overrides))


@lru_cache(maxsize=8)
def _composed(name: str, *overrides: str) -> DictConfig:
    return hydra.compose(name, list(overrides))
