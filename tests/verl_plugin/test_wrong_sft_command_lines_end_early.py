"""A wrong command line of tree SFT or DPO: one line that names key and remedy, exit code 2; a right one runs."""

from pathlib import Path
from typing import Any

import pytest
from jobs_before_ray import assert_names, write_job

from tree_rl.verl_plugin.launch import dpo
from tree_rl.verl_plugin.launch.sft import banner, checked

WRONG: list[tuple[str, ...]] = [
    ("engine.strategy=fsdp", "set engine.strategy=fsdp2"),
    ("engine.strateg=fsdp2", "did you mean engine.strategy?"),
    ("dta.train_files=x", "did you mean data.train_files?"),
    ("tree.max_token=5", "did you mean tree.max_tokens?"),
    ("engine.tree.mode=trees", "auto, tree, flat"),
    ("tree=4096", "tree.max_tokens=4096"),
    ("data.train_files=/nowhere.parquet", "no such file"),
    ("model.path=/nowhere", "no such folder"),
    ("model.use_fused_kernels=true",),
    ("model.use_liger=maybe", "expected true, false or auto"),
    ("trainer.test_freq=5", "trainer.test_freq=5, but data.val_files=None", "set it to -1"),
    ("trainer.test_freq=0", "expected a number of steps"),
    ("trainer.save_freq=each_epoch", "after_each_epoch"),
    ("trainer.resume_mode=resume_path trainer.resume_from_path=null", "expected an existing folder"),
    ("trainer.resume_from_path=/no/global_step_1", "existing folder"),
    ("+model.model_type=tree_languagemodel", "did you mean tree_language_model?"),
    ("data.pad_mode=right", "set it to no_padding"),
    ("engine.ulysses_sequence_parallel_size=0", "on 1 ranks:"),
    ("data.truncation=middle", "expected error, left or right"),
    ("data.num_workers=-1", "expected a whole number of at least 0"),
    ("trainer.seed=-1", "expected a whole number of at least 0"),
    ("data.apply_chat_template_kwargs=thinking",),
    ("data.custom_cls.path=pkg://tree_rl.verl_plugin.sft data.custom_cls.name=Rows", "it defines no Rows", "correct"),
    ("optim.optimizer=AdamX", "optim:", "AdamX"),
    ("optim.optimizer_impl=torch.optm", "optim:", "torch.optm"),
    ("optim.betas=[0.9,1.5]", "optim:", "1.5"),
    ("optim.lr_scheduler_type=linear", "constant, cosine"),
    ("optim.lr=[1", "optim.lr=[1:", "quote it"),
]
OF_DPO: list[tuple[str, ...]] = [
    ("dpo.beta=0", "expected a finite number above 0"),
    ("dpo.loss_type=hinge", "sigmoid, ipo"),
    ("dpo.label_smoothing=0.5", "expected a number from 0 to below 0.5"),
    ("dpo.label_smoothing=0.1 dpo.loss_type=ipo", "dpo.label_smoothing: ipo has none"),
    ("dpo.beta=null", "expected a number"),
    ("dpo.reference_free=1", "expected true or false"),
    ("+dpo.bet=1", "no such option; known are beta"),
    ("dpo.bet=1", "did you mean dpo.beta?"),
    ("tree.mode=flat", "pairs train on trees alone"),
    ("tree.path_weighting=session", "pairs train"),
    ("model.model_type=language_model",),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("job")
    write_job(folder)
    return ["machine=cpu", f"data.train_files={folder}/rows.parquet", f"model.path={folder}"]


@pytest.mark.parametrize("check, case", [*((checked, one) for one in WRONG), *((dpo.checked, one) for one in OF_DPO)])
def test_one_line_names_the_key(check: Any, case: tuple[str, ...], good: list[str], capsys: Any) -> None:
    wrong, *said = case
    with pytest.raises(SystemExit, match=r"^2$"):
        check([*good, *wrong.split()])
    line = capsys.readouterr().err
    assert line.startswith("tree_rl: ")
    assert_names(line.removesuffix("\n"), wrong.split(), *said)


def test_a_damaged_file_of_the_model_is_named(tmp_path: Path, capsys: Any) -> None:
    write_job(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SystemExit, match=r"^2$"):
        checked(["machine=cpu", f"data.train_files={tmp_path}/rows.parquet", f"model.path={tmp_path}"])
    assert f"model.path={tmp_path}: its tokenizer.json is damaged: " in capsys.readouterr().err


@pytest.mark.parametrize("written, is_refused", [("pass", True), ("AutoModelForCausalLMWithValueHead", False)])
def test_a_trl_without_the_class_that_verl_imports_is_refused(
    written: str, is_refused: bool, good: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").write_text(written)
    monkeypatch.syspath_prepend(tmp_path)
    if not is_refused:
        checked(good)
        return
    with pytest.raises(SystemExit, match=r"^2$"):
        checked(good)
    assert f"and {tmp_path}/trl no longer has it; pip uninstall trl" in capsys.readouterr().err


def test_short_forms_are_written_out_and_a_word_may_follow_a_number(good: list[str]) -> None:
    given = ["tree.mode=tree", "tree.max_tokens=64", "tree.max_tokens=auto", "trainer.save_freq=after_each_epoch"]
    config = checked([*good, *given, "trainer.total_epochs=2"])
    engine, trainer = config.engine, config.trainer
    assert (engine.tree.mode, engine.tree.max_tokens, engine.model_dtype) == ("tree", "auto", "fp32")
    assert (trainer.total_epochs, trainer.save_freq) == (2, "after_each_epoch")
    assert banner(config, "SFT").endswith("SFT on fsdp2; mode tree; attention auto")


@pytest.mark.parametrize("mode", ["auto", "resume_path"])
def test_a_checkpoint_that_is_there_is_resumed(mode: str, good: list[str], tmp_path: Path) -> None:
    (tmp_path / "global_step_2").mkdir()
    checked([*good, f"trainer.resume_mode={mode}", f"trainer.resume_from_path={tmp_path}/global_step_2/"])
