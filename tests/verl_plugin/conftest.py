import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Some train models that also read images.
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws does not depend on the tests before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The trainer's queue of rows, in this process."""
    from local_trainer import local_queue

    return local_queue(monkeypatch)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from engine_harness import save_model, tiny_qwen3

    return save_model(tmp_path_factory.mktemp("model"), tiny_qwen3())


@pytest.fixture(scope="module")
def word_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Qwen3 of 64 words."""
    from engine_harness import save_model, tiny_qwen3
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    path = save_model(tmp_path_factory.mktemp("model"), tiny_qwen3(vocab_size=64, eos_token_id=1))
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(64)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", pad_token="t0").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def image_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family, models that read images."""
    from wrapped_models import wrapped_config, wrapped_model

    root = tmp_path_factory.mktemp("models")
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"):
        wrapped_model(wrapped_config(family, initializer_range=0.2)).save_pretrained(root / family)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def stock(model_path: Path) -> Any:
    from engine_harness import build_engine

    return build_engine(model_path, tree=None)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """What torchrun tells the only rank of a job, and its process group."""
    from engine_harness import join_process_group

    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in world.items():
            patch.setenv(name, value)
        join_process_group()
        yield


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the recipes, and six conversations of four rows each."""
    from toy_qwen import run_recipe_script

    root = tmp_path_factory.mktemp("toy")
    run_recipe_script("tiny_model.py", root / "model")
    run_recipe_script("toy_task.py", root / "data", "--conversations", "6")
    return root


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command line that this machine runs."""
    from jobs_before_ray import write_job

    return write_job(tmp_path_factory.mktemp("job"))


@pytest.fixture
def job_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let a job find no cluster that runs on this machine, and compose verl's config once for all jobs."""
    from jobs_before_ray import composed_once

    from tree_rl.verl_plugin.launch import command_line

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(command_line, "compose", composed_once)
