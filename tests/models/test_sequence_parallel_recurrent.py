"""Models with recurrent layers whose tokens are scattered over ranks have the gradients of one rank."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hybrid_models import HYBRIDS, build
from recurrent_models import RECURRENT

from tree_rl.models.sequence_parallel_support import check_sequence_parallel

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from sharing_ranks import (
    Case,
    assert_equal_gradients,
    assert_no_failures,
    averaged,
    groups_of,
    join,
    note_failures,
    prepare,
    spawn,
    step,
)

CONFIGS = {**HYBRIDS, **RECURRENT}
DELTA_NET = {"layer_types": ["linear_attention", "full_attention"]}
CONV = {"layer_types": ["conv", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # name: (family, changes of its config)
    "qwen3_next": ("qwen3_next", DELTA_NET),
    "qwen3_5": ("qwen3_5", DELTA_NET),
    "one_key_head": ("qwen3_5", DELTA_NET | {"linear_num_key_heads": 1}),
    "equal_heads": ("qwen3_next", DELTA_NET | {"linear_num_key_heads": 4}),
    "key_heads_no_divisor": ("qwen3_5", DELTA_NET | {"linear_num_key_heads": 6, "linear_num_value_heads": 12}),
    "lfm2": ("lfm2", CONV),
    "lfm2_bias": ("lfm2", CONV | {"conv_bias": True}),
    "bamba": ("bamba", {"attn_layer_indices": [1]}),
    "one_group": ("bamba", {"attn_layer_indices": [1], "mamba_n_groups": 1}),
    "granite_4": ("granite_4", {"layer_types": ["mamba", "attention"], "mamba_n_groups": 4}),
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "mlp"]}),
    "falcon_h1": ("falcon_h1", {"mamba_n_groups": 1}),
    "zamba2": ("zamba2", {"layers_block_type": ["hybrid", "mamba"]}),
}
KINDS = ("qwen3_5", "lfm2", "bamba")
FORESTS = ("one_token", "two_tokens", "no_common_root", "identical_and_strict_prefix", "long_trunk")
CASES = {
    2: [Case(model=model, shapes=("comb", "two_tokens"), max_tokens=9) for model in MODELS],
    4: [
        *(Case(model=model, shapes=("comb",)) for model in MODELS),
        *(Case(model=model, shapes=(forest,)) for model in KINDS for forest in FORESTS),
        Case(model="bamba", shapes=("identical_and_strict_prefix",), max_tokens=4),
    ],
}
"""By the number of ranks that share tokens, of four in all."""
WORLD = 4


def model_of(case: Case) -> Any:
    family, changes = MODELS[case.model]
    stock = CONFIGS[family]
    model = build(type(stock)(**{**stock.to_dict(), "num_hidden_layers": 2, **changes}), torch.float32)
    draw = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        # Equal weights of all heads would hide that a rank takes others' heads.
        if name.endswith(("A_log", "dt_bias", ".D", "conv.bias")):
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    return prepare(model)


def on_one_rank(case: Case) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Gradients and log-probs of all groups of rows, one after the other."""
    model, log_probs = model_of(case), []
    for group in range(len(case.shapes)):
        _, result = step(case, model, group, None, self_check=False)
        log_probs.append(result.outputs.present().get("log_probs"))
    named = ((name, torch.zeros_like(p) if p.grad is None else p.grad) for name, p in model.named_parameters())
    return {name: gradient / len(case.shapes) for name, gradient in named}, log_probs


def check(case: Case, group: int, share: dist.ProcessGroup, expected: Any, device: str) -> None:
    gradients, log_probs = expected
    model = model_of(case).to(device)
    _, result = step(case, model, group, share, self_check=device == "cpu")
    if log_probs[group] is not None:
        torch.testing.assert_close(result.outputs["log_probs"].cpu(), log_probs[group], rtol=1e-5, atol=1e-5)
    assert_equal_gradients({name: gradient.cpu() for name, gradient in averaged(model).items()}, gradients)


def rank_main(rank: int, world: int, out: str, port: int, cases: dict[int, list[Case]], on_gpus: bool) -> None:
    """Run all cases and write what failed."""
    if on_gpus:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", rank=rank, world_size=world)
    else:
        join(rank, world, port)
    expected = torch.load(f"{out}/expected.pt")
    device = f"cuda:{rank}" if on_gpus else "cpu"
    shares = {size: groups_of(rank, world, size) for size in cases}
    named = [(size, case) for size, each in cases.items() for case in each]
    checks = (
        (f"{n}:{case.name}", partial(check, case, rank // n, shares[n], expected[n, case.name], device))
        for n, case in named
    )
    note_failures(out, rank, checks)


def assert_one_rank(out: Path, world: int, cases: dict[int, list[Case]], *, on_gpus: bool) -> None:
    expected = {(size, case.name): on_one_rank(case) for size, each in cases.items() for case in each}
    torch.save(expected, out / "expected.pt")
    spawn(rank_main, world, out, cases, on_gpus)
    assert_no_failures(out, world)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_models_scattered_over_gpus_are_those_of_one_rank(tmp_path: Path) -> None:
    world = 4 if torch.cuda.device_count() >= 4 else 2
    assert_one_rank(tmp_path, world, {world: CASES[4]}, on_gpus=True)


@pytest.mark.slow
def test_scattered_models_are_those_of_one_rank(tmp_path: Path) -> None:
    assert_one_rank(tmp_path, WORLD, CASES, on_gpus=False)


@pytest.mark.parametrize(
    ("family", "size", "message"),
    (
        (
            "qwen3_next",
            8,
            r"=8 does not divide num_attention_heads=4, linear_num_value_heads=4 of qwen3_next; set .* 4",
        ),
        ("lfm2", 3, r"=3 does not divide num_attention_heads=4, hidden_size=32 of lfm2; set .* to 1 or 2 or 4$"),
        ("bamba", 8, r"=8 does not divide num_attention_heads=4, mamba_n_heads=4 of bamba"),
        ("nemotron_h", 8, r"=8 does not divide num_attention_heads=4, mamba_num_heads=4 of nemotron_h"),
        ("zamba2", 8, r"=8 does not divide num_attention_heads=4, n_mamba_heads=4 of zamba2"),
    ),
)
def test_sizes_that_heads_do_not_allow_are_refused(family: str, size: int, message: str) -> None:
    for divisor in (1, 2, 4):
        check_sequence_parallel(CONFIGS[family], divisor)
    with pytest.raises(ValueError, match=message):
        check_sequence_parallel(CONFIGS[family], size)
