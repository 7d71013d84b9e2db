"""A step over trees runs where verl, ray, vllm and tensordict are absent, and serves other trainers' losses."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
BLOCK = """
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("verl", "ray", "vllm", "tensordict", "transfer_queue", "hydra"):
            raise ModuleNotFoundError(f"{name} is absent", name=name)
sys.meta_path.insert(0, Absent())
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run_without_verl(name: str) -> str:
    """What an example prints where verl and its dependencies cannot be imported."""
    command = [sys.executable, "-c", BLOCK, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_sixty_lines_print_equal_gradients() -> None:
    whole, partitioned = run_without_verl("tree_training_in_60_lines.py").splitlines()
    assert whole.startswith("whole: 26 tokens of rows as 12 unique ones in 1 forward(s)")
    assert partitioned.startswith("partitions of 4 tokens: 26 tokens of rows as 12 unique ones in 4 forward(s)")
    assert all(float(line.split()[-1]) < 1e-5 for line in (whole, partitioned))


def test_the_trl_style_trainer_learns() -> None:
    for line in run_without_verl("trl_style_trainer.py").splitlines():
        words = line.split()
        assert float(words[words.index("reward") + 1]) < 0.9 < float(words[words.index("steps,") + 1])


@pytest.mark.parametrize("loss_type", ("grpo", "dapo"))
@pytest.mark.parametrize("max_tokens", (None, 7, 16))
def test_trls_loss_has_the_gradients_of_padded_rows(loss_type: str, max_tokens: int | None) -> None:
    example = load("trl_style_trainer")
    options = example.TreeOptions(max_tokens=max_tokens)
    trainer = example.TreeGRPOTrainer(
        example.tiny_model(), example.GRPOLoss(loss_type=loss_type), lr=0.0, options=options
    )
    torch.manual_seed(1)
    inputs = example.generate(trainer)
    inputs["old_per_token_logps"] = inputs["old_per_token_logps"] + 0.2 * torch.randn_like(
        inputs["old_per_token_logps"]
    )
    inputs["ref_per_token_logps"] = inputs["ref_per_token_logps"] + 0.2 * torch.randn_like(
        inputs["ref_per_token_logps"]
    )
    got = trainer.backward(inputs)

    rows_alone = example.tiny_model()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    logits = rows_alone(ids).logits[:, inputs["prompt_ids"].shape[1] - 1 : -1]
    logps = logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]
    loss = trainer.loss(inputs, logps, list(range(len(ids))))
    loss.backward()
    # Advantages of a group sum to zero, and so nearly does the loss.
    assert got == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    for (name, expected), found in zip(rows_alone.named_parameters(), trainer.model.parameters(), strict=True):
        assert (found.grad - expected.grad).norm() <= 1e-5 * expected.grad.norm(), name
