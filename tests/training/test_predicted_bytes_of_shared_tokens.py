"""Bytes alive on a rank that shares a forest's tokens are within 10 % of what the memory model predicts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from larger_models import CPU, F32, build, rows_of
from live_bytes import peak_bytes
from sharing_ranks import join, spawn

from tree_rl.training import Rows, StepContext, TreeOptions, TreeStep
from tree_rl.training.memory.memory_of_module import read_memory_model
from tree_rl.training.micro_batch import predicted_peak

CASES: dict[str, tuple[bool, torch.dtype, str, int | None]] = {
    "whole": (True, F32, "trunk", None),
    "partitions": (True, F32, "comb", 200),
}


def rank_main(rank: int, world: int, out: str, port: int) -> None:
    """Predicted over alive bytes of each case."""
    join(rank, world, port)
    share = dist.new_group(list(range(world)))
    ratios = {}
    for name, (checkpointing, dtype, shape, max_tokens) in CASES.items():
        model: Any = build("dense", checkpointing=checkpointing, dtype=dtype)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        options = TreeOptions(mode="tree", max_tokens=max_tokens, self_check=False)
        step = TreeStep(model, options, context=StepContext.of(model, sequence_parallel=share))
        rows, batches = Rows.of(rows_of(shape)), []

        def update(step: TreeStep = step, rows: Rows = rows, batches: list[Any] = batches) -> None:
            result = step.run(rows, lambda outputs, members: (outputs["log_probs"].sum(), {}), is_separable=True)
            batches[:] = result.micro_batches

        alive = peak_bytes(update)
        memory = read_memory_model(model, dtype=dtype, device=CPU)
        assert memory is not None
        ratios[name] = predicted_peak(batches, replace(memory, sequence_ranks=world)).device / alive
    Path(f"{out}/ratios_{rank}.json").write_text(json.dumps(ratios))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ratios(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    out = tmp_path_factory.mktemp("ranks")
    spawn(rank_main, 2, out)
    return [json.loads((out / f"ratios_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_predicted_bytes_are_alive(ratios: list[dict[str, float]], case: str) -> None:
    for of_rank in ratios:
        assert of_rank[case] == pytest.approx(1, rel=0.1)
