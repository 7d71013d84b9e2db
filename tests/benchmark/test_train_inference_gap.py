"""The gap between vLLM's and the trainer's log-probs: none where they are the trainer's, and what was changed."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import train_inference_gap
from scripted_steps.inputs import build_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from tree_rl.training import rows_alone
from tree_rl.training.rows_alone import branch_log_probs

SIZES = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def add_log_probs(model: Any, sessions: list[dict[str, Any]]) -> None:
    """Let vLLM have said what rows alone say."""
    for session in sessions:
        of_row = branch_log_probs(model, [session["prompt"] + session["drawn"]]).detach()
        for name in ("log_probs", "read"):
            session[name] = of_row[len(session["prompt"]) - 1 : -1].tolist()


def test_the_gap_is_what_the_sampler_says_otherwise() -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval()
    sessions: list[dict[str, Any]] = [
        {"prompt": prompt, "drawn": drawn}
        for prompt, drawn in (([5, 6, 7], [8, 9]), ([5, 6, 7], [8, 4, 3]), ([2], [6, 6]))
    ]
    add_log_probs(model, sessions)
    same = train_inference_gap.gaps(model, sessions)
    assert same["rows_largest"] == 0 and same["rows_equal"] == 1
    assert same["trees_largest"] == pytest.approx(0, abs=1e-5)
    sessions[1]["log_probs"][2] -= 0.5
    other = train_inference_gap.gaps(model, sessions)
    for name in ("rows", "trees", "vllm"):
        assert other[f"{name}_largest"] == pytest.approx(0.5, abs=1e-5)
        assert other[f"{name}_mean"] == pytest.approx(0.5 / 7, abs=1e-5)
        assert other[f"{name}_k3"] == pytest.approx((torch.tensor(0.5).exp().item() - 1.5) / 7, abs=1e-5)


def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for vLLM's kernels, which take a GPU, with what they compute, in the same layouts and in place."""

    def rms_norm(hidden: Any, weight: Any, epsilon: float) -> Any:
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon) * weight

    def fused_add_rms_norm(hidden: Any, residual: Any, weight: Any, epsilon: float) -> None:
        residual += hidden
        hidden.copy_(rms_norm(residual, weight, epsilon))

    def rotary_embedding(positions: Any, query: Any, key: Any, size: int, cache: Any, is_neox: bool) -> None:
        assert is_neox
        cos, sin = (part[:, None] for part in cache[positions].chunk(2, -1))
        for heads in (query, key):
            left, right = heads.view(len(heads), -1, size).chunk(2, -1)
            heads.copy_(torch.cat([left * cos - right * sin, right * cos + left * sin], -1).flatten(1))

    def silu_and_mul(out: Any, gate_and_up: Any) -> None:
        gate, up = gate_and_up.chunk(2, -1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    def flash_attn_varlen_func(
        queries: Any, key: Any, value: Any, *, cu_seqlens_q: Any, block_table: Any, seqused_k: Any, **rest: Any
    ) -> Any:
        assert rest["causal"] and len(block_table) == len(seqused_k) == len(cu_seqlens_q) - 1
        groups, out = queries.shape[1] // key.shape[2], torch.empty_like(queries)
        for number, keys in enumerate(seqused_k.tolist()):
            start, end = cu_seqlens_q[number : number + 2].tolist()
            rows = [pages[block_table[number]].flatten(0, 1)[:keys] for pages in (key, value)]
            heads = (queries[start:end], *(row.repeat_interleave(groups, 1) for row in rows))
            q, k, v = (row.transpose(0, 1) for row in heads)
            mask = torch.ones(end - start, keys, dtype=torch.bool).tril(keys - (end - start))  # from the end
            attend = torch.nn.functional.scaled_dot_product_attention
            out[start:end] = attend(q, k, v, attn_mask=mask, scale=rest["softmax_scale"]).transpose(0, 1)
        assert end == len(queries)
        return out

    def compute_token_logprobs(logits: Any, ids: Any) -> Any:
        return logits.log_softmax(-1).gather(1, ids)

    vllm = {
        "": {},
        "._custom_ops": {"fused_add_rms_norm": fused_add_rms_norm, "rotary_embedding": rotary_embedding},
        ".model_executor.determinism.batch_invariant": {
            "init_batch_invariance": lambda: None,
            "linear_batch_invariant": torch.nn.functional.linear,
            "rms_norm_batch_invariant": rms_norm,
        },
        ".v1.worker.gpu.sample.logprob": {"compute_token_logprobs": compute_token_logprobs},
        ".vllm_flash_attn.flash_attn_interface": {"flash_attn_varlen_func": flash_attn_varlen_func},
    }
    for name, functions in vllm.items():
        parts = f"vllm{name}".split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[path])
        vars(sys.modules[".".join(parts)]).update(functions)
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(silu_and_mul=silu_and_mul), raising=False)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM's own kernels are here")
def test_layers_on_vllms_kernels_compute_what_transformers_layers_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.models.llama.modeling_llama as llama

    plain_kernels(monkeypatch)
    for owner, name in ((rows_alone, "next_log_probs"), (llama, "apply_rotary_pos_emb")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored behind the test
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**(SIZES | {"num_key_value_heads": 2}))).eval()
    prompts = [list(range(2, 19)), list(range(2, 19)), [3]]
    replies = [[8, 9, 4], [8, 3, 5], [6] * 31]  # twice 20, and two whole pages
    sessions: list[dict[str, Any]] = [
        {"prompt": prompt, "drawn": reply} for prompt, reply in zip(prompts, replies, strict=True)
    ]
    add_log_probs(model, sessions)
    train_inference_gap.use_kernels_of_vllm(model)
    found = train_inference_gap.gaps(model, sessions)
    assert found["rows_largest"] == pytest.approx(0, abs=1e-5)
    assert found["trees_largest"] == pytest.approx(0, abs=1e-5)


def test_padded_heads_give_the_same_log_probs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**(SIZES | {"num_key_value_heads": 2, "initializer_range": 0.5}))
    model: Any = AutoModelForCausalLM.from_config(config).bfloat16()
    for saved in (model, build_tokenizer(20)):
        saved.save_pretrained(tmp_path / "plain")
    padded = train_inference_gap.with_padded_heads(tmp_path / "plain", 32, tmp_path / "padded")
    plain, wide = (
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32) for one in (tmp_path / "plain", padded)
    )
    assert wide.config.head_dim == 32 and wide.model.layers[0].self_attn.q_proj.weight.shape == (4 * 32, 32)
    row = [torch.randint(20, [50]).tolist()]
    found, wanted = branch_log_probs(wide, row), branch_log_probs(plain, row)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)  # the root of 4 is exact in bf16
    with pytest.raises(ValueError, match=r"--head-size 12: expected a multiple of 8, the heads of .*plain"):
        train_inference_gap.with_padded_heads(tmp_path / "plain", 12, tmp_path / "other")
