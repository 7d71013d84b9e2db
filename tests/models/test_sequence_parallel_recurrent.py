"""Recurrent layers whose tokens are scattered over ranks: alone, and in whole models, they are those of one rank."""

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hybrid_models import HYBRIDS, build
from recurrent_models import RECURRENT
from scattered_layers import FORESTS, LAYERS, check_layer
from sharing_ranks import Case, assert_equal_gradients, averaged, join, prepare, spawn, step

from tree_rl.models.sequence_parallel import SequenceParallel
from tree_rl.models.sequence_parallel_support import check_sequence_parallel

TWO_LAYERS = {
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
}
WHOLE = {
    2: [Case(model=model, shapes=("comb", "two_tokens"), max_tokens=9) for model in TWO_LAYERS],
    4: [
        *(Case(model=model, shapes=("comb",)) for model in TWO_LAYERS),
        Case(model="qwen3_5", shapes=("one_token",)),
        Case(model="bamba", shapes=("identical_and_strict_prefix",), max_tokens=4),
    ],
}
"""By the number of ranks that share tokens, of four in all."""
ALONE = {
    2: [(layer, forest) for layer in LAYERS for forest in ("one_token", "comb")],
    4: [
        *((layer, "comb") for layer in LAYERS),
        *((layer, forest) for layer in ("qwen3_5", "lfm2", "bamba") for forest in FORESTS if forest != "comb"),
    ],
}
"""The same for layers."""
WORLD = 4


def model_of(case: Case) -> Any:
    stock = {**HYBRIDS, **RECURRENT}[case.model]
    config = type(stock)(**{**stock.to_dict(), "num_hidden_layers": 2, **TWO_LAYERS[case.model]})
    return prepare(build(config, torch.float32))


def on_one_rank(case: Case) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Gradients and log-probs of all groups of rows, one after the other."""
    model, log_probs = model_of(case), []
    for group in range(len(case.shapes)):
        _, result = step(case, model, group, None, self_check=False)
        log_probs.append(result.outputs.present().get("log_probs"))
    named = ((name, torch.zeros_like(p) if p.grad is None else p.grad) for name, p in model.named_parameters())
    return {name: gradient / len(case.shapes) for name, gradient in named}, log_probs


def check_model(case: Case, group: int, share: dist.ProcessGroup, expected: Any) -> None:
    gradients, log_probs = expected
    model = model_of(case)
    _, result = step(case, model, group, share)
    if log_probs[group] is not None:
        torch.testing.assert_close(result.outputs["log_probs"], log_probs[group], rtol=1e-5, atol=1e-5)
    assert_equal_gradients(averaged(model), gradients)


def rank_main(rank: int, world: int, out: str, port: int) -> None:
    """Run all cases and write what failed."""
    join(rank, world, port)
    expected = torch.load(f"{out}/expected.pt")
    failures: dict[str, str] = {}

    def note(name: str, check: Callable[..., None], *args: Any) -> None:
        try:
            check(*args)
        except AssertionError:
            failures[name] = traceback.format_exc()

    for size, cases in WHOLE.items():
        shares = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
        share = shares[rank // size]
        ranks = SequenceParallel.of(share)
        for layer, forest in ALONE[size]:
            note(f"{size}: {layer} {forest}", check_layer, layer, forest, ranks)
        for case in cases:
            note(f"{size}: {case.name}", check_model, case, rank // size, share, expected[size, case.name])
    Path(f"{out}/failures_{rank}.json").write_text(json.dumps(failures))
    dist.destroy_process_group()


def gpu_rank_main(rank: int, world: int, out: str, port: int) -> None:
    """All layers and forests, one GPU a rank; the first failure ends the test."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    ranks = SequenceParallel.of(dist.group.WORLD)
    assert ranks is not None
    for layer in LAYERS:
        for forest in FORESTS:
            check_layer(layer, forest, ranks, f"cuda:{rank}")
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_scattered_layers_on_gpus_are_those_of_one(tmp_path: Path) -> None:
    spawn(gpu_rank_main, 4 if torch.cuda.device_count() >= 4 else 2, tmp_path)


@pytest.mark.slow
def test_scattered_layers_and_models_are_those_of_one_rank(tmp_path: Path) -> None:
    expected = {(size, case.name): on_one_rank(case) for size, cases in WHOLE.items() for case in cases}
    torch.save(expected, tmp_path / "expected.pt")
    spawn(rank_main, WORLD, tmp_path)
    failures: dict[str, str] = {}
    for rank in range(WORLD):
        failures |= json.loads((tmp_path / f"failures_{rank}.json").read_text())
    assert not failures, "\n".join(f"{name}\n{text}" for name, text in failures.items())


@pytest.mark.parametrize(
    ("family", "size", "message"),
    (
        (
            "qwen3_next",
            8,
            r"=8 does not divide num_attention_heads=4, linear_num_value_heads=4 of qwen3_next; set .* 4",
        ),
        ("lfm2", 3, r"=3 does not divide num_attention_heads=4, hidden_size=32 of lfm2; set .* to 1 or 2 or 4$"),
        (
            "bamba",
            8,
            r"ulysses_sequence_parallel_size=8 does not divide num_attention_heads=4, mamba_n_heads=4 of bamba",
        ),
    ),
)
def test_sizes_that_heads_do_not_allow_are_refused(family: str, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_sequence_parallel({**HYBRIDS, **RECURRENT}[family], size)


@pytest.mark.parametrize("family", TWO_LAYERS)
def test_sizes_that_divide_all_heads_are_allowed(family: str) -> None:
    for size in (1, 2, 4):
        check_sequence_parallel({**HYBRIDS, **RECURRENT}[family], size)
