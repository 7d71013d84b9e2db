"""Without flash-attn the comparison gives stock verl a fused kernel for log-probs instead of its loop over tokens."""

import pytest
import torch

from tree_rl.benchmark.against_verl import without_flash_attention_2 as without
from tree_rl.verl_plugin.compat import torch_functional, transformer_impl


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
    monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", True)
    with without.log_probs_in_one_pass() as what:
        assert (what, transformer_impl.logprobs_from_logits) == ("flash-attn", before)
    monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False)
    with without.log_probs_in_one_pass() as what:
        assert (what, transformer_impl.logprobs_from_logits) == ("tree_kernels, from logits", without.fused_log_probs)
    assert transformer_impl.logprobs_from_logits is before
