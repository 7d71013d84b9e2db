"""A job of two ranks finds a changed byte in the file of the second: it says so and repeats the steps since the last.

Takes about five minutes on two cores. What else can be damaged, tests/verl_plugin does without Ray.
"""

import json
from pathlib import Path

import job
import pytest

from tree_rl.verl_plugin.resume.checkpoint_record import RECORD

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1200)]


def run(folder: Path, steps: int) -> tuple[int, str]:
    """Start the job again and wait for its end; exit status and log."""
    log = folder / f"log_{len(list(folder.glob('log_*')))}.txt"
    status = job.start(folder, log, [*job.ONE_NODE, f"trainer.total_training_steps={steps}"]).wait(timeout=500)
    assert job.wait_until_none(folder, 90) == []
    return status, log.read_text()


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_changed_byte_costs_the_steps_since_the_checkpoint_before(tmp_path: Path) -> None:
    job.prepare(tmp_path)
    out = tmp_path / "out"
    status, log = run(tmp_path, 4)
    assert status == 0, log[-6000:]
    trained = job.read_ledger(out)
    files = json.loads((out / "global_step_4" / RECORD).read_text())["files"]
    kinds = ("model", "optim", "extra_state")
    ranks = {f"actor/{kind}_world_size_2_rank_{rank}.pt" for kind in kinds for rank in range(2)}
    assert ranks | {"data.pt", "tree_trainer.json", "updates.jsonl", "actor/huggingface/config.json"} <= files.keys()

    damaged = out / "global_step_4" / "actor" / "optim_world_size_2_rank_1.pt"
    change_a_byte(damaged)
    status, log = run(tmp_path, 6)
    assert status == 0, log[-6000:]
    named = [line for line in log.splitlines() if str(damaged) in line and "step 4 is damaged" in line]
    assert len(named) == 1 and "Resuming from" in log and "setting global step to 2" in log
    # The repeated steps draw the same rows.
    assert job.read_ledger(out)[: len(trained)] == trained
    assert [group["step"] for group in job.read_ledger(out)] == [step for step in range(1, 7) for _ in range(4)]

    for step in (2, 4, 6):
        change_a_byte(out / f"global_step_{step}" / "actor" / "model_world_size_2_rank_0.pt")
    status, log = run(tmp_path, 8)
    assert status != 0 and "no checkpoint is whole. Tried: step 6: " in log
    assert "Training Progress" not in log and "UnpicklingError" not in log and "PytorchStreamReader" not in log
