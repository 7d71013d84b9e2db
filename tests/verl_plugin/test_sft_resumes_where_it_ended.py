"""A resumed SFT run takes the batches that the uninterrupted run took, wherever it was saved."""

from pathlib import Path

import pytest
from sft_harness import fitted, sft_config

from tree_rl.verl_plugin.sft import TreeSFTTrainer

STEPS_OF_EPOCH = 3
"""24 rows (6 conversations of 4) in batches of 8."""
BY_CONVERSATION, BY_ROW = "data.group_key=conversation", "data.group_key=null"


pytestmark = pytest.mark.usefixtures("one_rank")
Taken = dict[int, tuple[list[list[int]], float]]
"""Step -> token ids of its rows, and its loss."""


def train(toy: Path, folder: Path, *overrides: str) -> Taken:
    """Run verl's SFT loop, with a checkpoint after every step."""
    files = [f"data.train_files={toy}/data/sft.parquet", f"model.path={toy}/model"]
    saves = [f"trainer.default_local_dir={folder}", "trainer.save_freq=1", "trainer.total_epochs=2"]
    trainer = TreeSFTTrainer(sft_config("data.train_batch_size=8", *files, *saves, *overrides))
    steps = enumerate(fitted(trainer), trainer.resume_global_step + 1)
    return {number: (step["rows"], step["loss"]) for number, step in steps}


def resume(toy: Path, root: Path, step: int, *overrides: str) -> Taken:
    """Go on from a checkpoint of the run in `root`; later checkpoints go elsewhere."""
    mode = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={root}/global_step_{step}"]
    return train(toy, root / f"from{step}", *mode, *overrides)


def same(ours: Taken, theirs: Taken) -> bool:
    """Whether two runs took the same rows, with the same losses, at the same steps."""
    rows = {step: rows for step, (rows, _) in ours.items()} == {step: rows for step, (rows, _) in theirs.items()}
    return rows and [loss for _, loss in ours.values()] == pytest.approx([loss for _, loss in theirs.values()], 1e-6)


@pytest.fixture(scope="module")
def whole(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Taken]:
    root = tmp_path_factory.mktemp("whole")
    return root, train(toy, root, BY_CONVERSATION)


def after(step: int, taken: Taken) -> Taken:
    return {later: kept for later, kept in taken.items() if later > step}


@pytest.mark.parametrize("step", [STEPS_OF_EPOCH, STEPS_OF_EPOCH + 1])
def test_a_run_goes_on_with_the_next_batch(toy: Path, whole: tuple[Path, Taken], step: int) -> None:
    root, taken = whole
    assert sorted(taken) == list(range(1, 2 * STEPS_OF_EPOCH + 1))
    assert same(resume(toy, root, step, BY_CONVERSATION), after(step, taken))


def test_a_run_that_is_resumed_twice_goes_on_with_the_next_batch(toy: Path, whole: tuple[Path, Taken]) -> None:
    root, taken = whole
    first, second = 2, STEPS_OF_EPOCH
    # The learning rate is constant, so a planned end changes no loss.
    resume(toy, root, first, BY_CONVERSATION, f"trainer.total_training_steps={second}")
    assert same(resume(toy, root / f"from{first}", second, BY_CONVERSATION), after(second, taken))


def test_rows_that_verls_sampler_deals_and_a_process_reads_ahead_go_on(toy: Path, tmp_path: Path) -> None:
    taken = train(toy, tmp_path, BY_ROW, "data.num_workers=1")
    rest = resume(toy, tmp_path, STEPS_OF_EPOCH, BY_ROW, "data.num_workers=1")
    assert same(rest, after(STEPS_OF_EPOCH, taken))


def test_a_done_run_trains_no_more(toy: Path, whole: tuple[Path, Taken], capfd: pytest.CaptureFixture[str]) -> None:
    root, taken = whole
    for step in (STEPS_OF_EPOCH, STEPS_OF_EPOCH + 1):
        assert resume(toy, root, step, BY_CONVERSATION, f"trainer.total_training_steps={step}") == {}
        assert f"all {step} steps are trained; raise trainer.total_epochs" in capfd.readouterr().out
    longer = resume(toy, root, 2 * STEPS_OF_EPOCH, BY_CONVERSATION, "trainer.total_epochs=3")
    assert sorted(longer) == [7, 8, 9]
    # An epoch has every row once.
    epoch = sorted(row for step in (1, 2, 3) for row in taken[step][0])
    assert sorted(row for rows, _ in longer.values() for row in rows) == epoch
