"""Where the comparison gives stock verl other kernels than flash-attn 2: rows by flash-attn-4, log-probs in one pass.

flash-attn-4 runs on GPUs only; a stand-in with its signature, as strict about lengths, computes the same attention.
"""

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from rows_by_torch import attend_rows
from transformers import AutoModelForCausalLM, Qwen3Config, modeling_flash_attention_utils
from transformers.modeling_utils import PreTrainedModel

from tree_rl.benchmark.against_verl import without_flash_attention_2 as without
from tree_rl.benchmark.against_verl.without_flash_attention_2 import NAME, let_flash_attention_4_read_rows
from tree_rl.verl_plugin.compat import torch_functional, transformer_impl

ROWS = ((5, 9, 3, 8, 1), (5, 9, 3, 7, 2, 4))
CALLS: list[list[int]] = []


def of_rows(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
) -> Any:
    """flash_attn_varlen_func by torch, without a dropout, which flash-attn-4 has not."""
    assert isinstance(max_seqlen_q, int) and isinstance(max_seqlen_k, int)
    assert causal and torch.equal(cu_seqlens_q, cu_seqlens_k) and not deterministic
    CALLS.append(cu_seqlens_q.tolist())
    return attend_rows(q, k, v, CALLS[-1], softmax_scale), None


def dense(q: Any, k: Any, v: Any, softmax_scale: float | None = None, causal: bool = False) -> Any:
    """flash_attn_func: other kernels, which nobody asked for."""
    raise AssertionError("expected rows with offsets")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny Qwen3 that believes in flash_attention_4."""
    package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    package.cute = cute  # type: ignore[attr-defined]
    cute.flash_attn_varlen_func, cute.flash_attn_func = of_rows, dense  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setattr(modeling_flash_attention_utils, "is_flash_attn_4_available", lambda: True)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *args, **kwargs: True)
    let_flash_attention_4_read_rows()
    let_flash_attention_4_read_rows()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3Config(vocab_size=32, num_key_value_heads=2, head_dim=8, **sizes)
    built = AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    CALLS.clear()
    return built


def test_rows_end_to_end_and_alone_run_one_kernel_and_a_padded_batch_is_refused(model: Any) -> None:
    ids = torch.tensor([[token for row in ROWS for token in row]])
    positions = torch.tensor([[place for row in ROWS for place in range(len(row))]])
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    assert CALLS == [[0, 5, 11]] * 2
    alone = []
    for row in ROWS:
        positions = torch.arange(len(row))[None]
        alone.append(model(input_ids=torch.tensor([row]), position_ids=positions, use_cache=False).logits[0])
    assert CALLS[2:] == [[0, 5]] * 2 + [[0, 6]] * 2
    torch.testing.assert_close(torch.cat(alone), packed)
    with pytest.raises(ValueError, match="expected one row or rows end to end, received a batch of 2 rows"):
        model(input_ids=torch.ones(2, 5, dtype=torch.long), use_cache=False)
    model.set_attn_implementation("sdpa")
    by_torch = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in ROWS]
    torch.testing.assert_close(torch.cat(by_torch), packed)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", ((7,), (2, 3)))
def test_log_probs_and_gradients_are_those_of_verl_s_loop(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(*shape, 50, generator=draw)).to(dtype)
    labels = torch.randint(50, shape, generator=draw)
    weight = torch.randn(*shape, generator=draw)
    results = []
    for function in (torch_functional.logprobs_from_logits_v2, without.fused_log_probs):
        leaf = logits.clone().requires_grad_()
        values = function(leaf, labels)
        results.append((values.float(), *torch.autograd.grad((values.float() * weight).sum(), leaf)))
    # verl's loop rounds log-probs to bfloat16.
    tolerance = {"rtol": 2**-7, "atol": 2**-7} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for looped, fused in zip(*results, strict=True):
        assert looped.shape == fused.shape and looped.dtype == fused.dtype
        torch.testing.assert_close(fused, looped, **tolerance)


def test_flash_attn_s_own_kernel_stays_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = transformer_impl.logprobs_from_logits
    ours = ("tree_kernels, from logits", without.fused_log_probs)
    for is_there, expected in ((True, ("flash-attn", before)), (False, ours)):
        monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", is_there)
        with without.log_probs_in_one_pass() as what:
            assert (what, transformer_impl.logprobs_from_logits) == expected
    assert transformer_impl.logprobs_from_logits is before
