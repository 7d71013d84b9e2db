"""DPO by `python -m tree_rl.train dpo`: margins grow, the reference is the first model, pairs share their prompt."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from sft_harness import CPU, fitted, write
from transformers import AutoModelForCausalLM, AutoTokenizer

from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.verl_plugin.dpo.dpo_trainer import TreeDPOTrainer
from tree_rl.verl_plugin.launch.dpo import checked

SMALL = [*CPU, "data.train_batch_size=8", "optim.lr=1e-3", "trainer.total_epochs=2", "tree.max_tokens=64"]


@pytest.fixture(scope="module")
def pairs(toy: Path) -> Path:
    """12 prompts of the toy task with two pairs each: digits are chosen, words rejected."""
    rows = []
    for number in range(10, 22):
        prompt = [{"role": "system", "content": "You count."}, {"role": "user", "content": f"Count on from {number}."}]
        for words in ("no", "I will not do that"):
            answers = (f"{number + 1}{number + 2}", words)
            chosen, rejected = ([{"role": "assistant", "content": answer}] for answer in answers)
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    path = toy / "data" / "pairs.parquet"
    pd.DataFrame(rows).to_parquet(path)
    return path


def trainer_of(toy: Path, pairs: Path, tmp_path: Path, *overrides: str) -> TreeDPOTrainer:
    files = [f"data.train_files={pairs}", f"model.path={toy}/model", f"trainer.default_local_dir={tmp_path}/saved"]
    return TreeDPOTrainer(checked([*SMALL, *files, *overrides]))


@pytest.mark.usefixtures("one_rank")
def test_the_reference_is_the_model_before_the_first_step(toy: Path, pairs: Path, tmp_path: Path) -> None:
    trainer = trainer_of(toy, pairs, tmp_path, f"data.val_files={pairs}")
    tokenizer = AutoTokenizer.from_pretrained(toy / "model")
    model = AutoModelForCausalLM.from_pretrained(toy / "model")
    for number, row in pd.read_parquet(pairs).iterrows():
        for side, name in enumerate(("chosen", "rejected")):
            start = tokenizer.apply_chat_template(list(row["prompt"]), add_generation_prompt=True, return_dict=False)
            ids = tokenizer.apply_chat_template([*row["prompt"], *row[name]], return_dict=False)
            assert ids[: len(start)] == start
            with torch.no_grad():
                expected = branch_log_probs(model, [ids])[len(start) - 1 :].sum().item()
            assert trainer.train_dataset.reference[number, side].item() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(trainer.val_dataset.reference, trainer.train_dataset.reference, rtol=1e-5, atol=0)
    # The two pairs of a prompt are one group.
    assert len(set(trainer.train_dataset.group_of_pair.tolist())) == 12


@pytest.mark.usefixtures("one_rank")
def test_margins_grow_and_a_resumed_run_keeps_its_reference(toy: Path, pairs: Path, tmp_path: Path) -> None:
    saving = ["trainer.resume_mode=auto", "trainer.save_freq=3"]
    whole = trainer_of(toy, pairs, tmp_path, *saving)
    steps = fitted(whole)
    assert len(steps) == 6
    first, last = steps[0], steps[-1]
    # Before the first step policy and reference are one model.
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert first["loss"] == pytest.approx(0.6931, rel=1e-3)
    assert last["rewards/margins"] > 0.05 and last["rewards/accuracies"] == 1.0 and last["loss"] < first["loss"]
    assert last["logps/chosen"] - last["logps/rejected"] > first["logps/chosen"] - first["logps/rejected"]
    assert first["tree/realised_saving"] > 0.5
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = trainer_of(toy, pairs, tmp_path, *saving)
    assert resumed.resume_global_step == 3
    assert torch.equal(resumed.train_dataset.reference, whole.train_dataset.reference)
    again = fitted(resumed)
    assert [step["loss"] for step in again] == pytest.approx([step["loss"] for step in steps[3:]], rel=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_with_lora_the_model_without_adapters_is_the_reference(toy: Path, pairs: Path, tmp_path: Path) -> None:
    lora = ["model.lora_rank=4", "model.lora_alpha=8", "model.target_modules=[q_proj,v_proj]"]
    plain = trainer_of(toy, pairs, tmp_path).train_dataset.reference
    trainer = trainer_of(toy, pairs, tmp_path, *lora)
    torch.testing.assert_close(trainer.train_dataset.reference, plain, rtol=1e-5, atol=0)
    steps = fitted(trainer)
    assert steps[-1]["rewards/margins"] > steps[0]["rewards/margins"] == pytest.approx(0, abs=1e-4)
    # The adapters have moved, but the model below them is still the reference.
    torch.testing.assert_close(trainer._reference(trainer.train_dataset), plain, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_the_command_trains_on_two_ranks(toy: Path, pairs: Path, tmp_path: Path) -> None:
    files = [f"data.train_files={pairs}", f"model.path={toy}/model", "trainer.logger=[console,file]"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tree_rl.train", "dpo", *SMALL, *files, f"trainer.default_local_dir={tmp_path}/saved"]
    metrics = tmp_path / "steps.jsonl"
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"VERL_FILE_LOGGER_PATH": str(metrics)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"^tree_rl \S+: sigmoid loss of pairs on fsdp2; mode auto", done.stderr, re.MULTILINE)
    steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    assert steps[-2]["rewards/accuracies"] == 1.0 and steps[-2]["rewards/margins"] > 0.05


@pytest.mark.usefixtures("one_rank")
def test_a_mistake_in_the_data_takes_no_device(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeDPOTrainer, "_build_engine", lambda self: pytest.fail("took a device"))
    few = write(tmp_path / "few.parquet", prompt=["a"], chosen=["b"], rejected=["c"])
    with pytest.raises(ValueError, match=r"data\.train_files: expected at least the 8 pairs of a batch, received 1"):
        trainer_of(toy, few, tmp_path)
    many = write(tmp_path / "many.parquet", prompt=["a"] * 8, chosen=["b"] * 8, rejected=["c"] * 8)
    with pytest.raises(ValueError, match=r"data\.val_files: expected at least the 8 pairs of a batch, received 1"):
        trainer_of(toy, many, tmp_path, f"data.val_files={few}")
    bare = write(tmp_path / "bare.parquet", chosen=["b"], answer=["c"])
    with pytest.raises(ValueError, match=r"data\.train_files: \S*bare\.parquet: .*missing \['rejected'\]"):
        trainer_of(toy, bare, tmp_path)
