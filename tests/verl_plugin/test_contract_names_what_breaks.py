"""A checkout of verl says by name what of it no longer fits, without running it: how a later verl is looked at."""

import shutil
from pathlib import Path

import pytest
import verl
from verl_checkout import broken

INSTALLED = Path(verl.__file__).parents[1]
CHANGES = {
    # (file, what stands there, what comes instead) -> lines
    (
        "trainer/ppo/v1/trainer_base.py",
        "def _update_actor(self, batch: KVBatchMeta,",
        "def _update_actor(self, rows,",
    ): ("PPOTrainer._update_actor(rows, metrics), here (batch, metrics)",),
    ("workers/utils/losses.py", "def value_loss(", "def critic_loss("): ("no value_loss in verl.workers.utils.losses",),
    ("workers/engine/fsdp/transformer_impl.py", "def _gradient_sync_context(", "def _sync_context("): (
        "no FSDPEngineWithLMHead._gradient_sync_context in verl.workers.engine.fsdp.transformer_impl",
    ),
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(INSTALLED / "verl", folder / "verl", ignore=shutil.ignore_patterns("*.pyc", "*.yaml"))
    return folder


def test_the_installed_verl_breaks_nothing() -> None:
    assert broken(INSTALLED) == []


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[1][4:30])
def test_what_another_verl_renames_is_named(checkout: Path, change: tuple[str, str, str]) -> None:
    file, there, instead = change
    path = checkout / "verl" / file
    text = path.read_text()
    assert text.count(there) == 1
    path.write_text(text.replace(there, instead))
    assert broken(checkout) == list(CHANGES[change])
    path.write_text(text)


def test_a_module_that_is_gone_is_named_once_a_name(checkout: Path) -> None:
    path = checkout / "verl/trainer/ppo/padding_utils.py"
    moved = path.rename(path.with_suffix(".txt"))
    assert broken(checkout) == [
        "no module verl.trainer.ppo.padding_utils, for upsample_batch_to_divisible_size",
        "no upsample_batch_to_divisible_size in verl.trainer.ppo.padding_utils",
    ]
    moved.rename(path)
