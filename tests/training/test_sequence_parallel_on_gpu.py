"""GPUs that share a forest's tokens over NCCL: as exact as one GPU, and one that runs out of memory rejoins."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from failing_memory import fail_once
from rank_processes import run_ranks
from sharing_ranks import SIZES, averaged, prepare
from tiny_sizes import VOCAB
from transformers import AutoModelForCausalLM, Qwen3Config

from tree_rl.cost.memory import budget
from tree_rl.training import Rows, StepContext, TreeOptions, TreeStep

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 2048}
BUDGETS = (None, 300)


def rows() -> Rows:
    """A trunk with branches of odd lengths: 1003 tokens and more."""
    draw = np.random.default_rng(0)
    trunk = draw.integers(3, VOCAB, 501)
    return Rows.of([np.append(trunk[: 501 - 40 * i], draw.integers(3, VOCAB, 99 + i)) for i in range(5)])


def gradient(dtype: torch.dtype, share: Any, max_tokens: int | None, *, fails: bool = False) -> torch.Tensor:
    """Of one step, averaged over the ranks, end to end."""
    torch.manual_seed(0)
    config = Qwen3Config(**{**SIZES, **WIDE, "initializer_range": 0.05})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to("cuda", dtype).train()
    prepare(model)
    left = fail_once(model, "backward", 0)[0] if fails else lambda: -1
    step = TreeStep(
        model, TreeOptions(mode="tree", max_tokens=max_tokens), context=StepContext.of(model, sequence_parallel=share)
    )
    given = rows()
    weight_F = torch.linspace(-1, 2, len(given.token_ids_F), device="cuda")
    step.run(given, lambda outputs, members: ((outputs["log_probs"] * weight_F).mean(), {}), is_separable=True)
    assert left() < 0
    return torch.cat([g.float().flatten().cpu() for g in averaged(model).values()])


def rank_main(rank: int) -> dict[str, float]:
    """Errors against one GPU in float32, relative to the gradient's norm."""
    budget.GRANULARITY = 64
    share = dist.new_group(list(range(dist.get_world_size())))
    errors = {}
    for max_tokens in BUDGETS:
        exact = gradient(torch.float32, None, max_tokens)
        for name, found in {
            "alone": gradient(torch.bfloat16, None, max_tokens),
            "shared": gradient(torch.bfloat16, share, max_tokens),
            "shared_float32": gradient(torch.float32, share, max_tokens),
            "failed_float32": gradient(torch.float32, share, max_tokens, fails=rank == 1),
        }.items():
            errors[f"{name}_{max_tokens}"] = float((found - exact).norm() / exact.norm())
    return errors


@pytest.fixture(scope="module", params=(2, 4), ids="{} GPUs".format)
def errors(request: pytest.FixtureRequest) -> Any:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} CUDA devices")
    return run_ranks(rank_main, request.param, backend="nccl")[0]


@pytest.mark.gpu
@pytest.mark.parametrize("max_tokens", BUDGETS)
def test_gpus_that_share_tokens_train_as_one(errors: dict[str, float], max_tokens: int | None) -> None:
    assert errors[f"shared_{max_tokens}"] <= 1.2 * errors[f"alone_{max_tokens}"]
    assert errors[f"shared_float32_{max_tokens}"] <= 1e-4
    assert errors[f"failed_float32_{max_tokens}"] <= 1e-4
