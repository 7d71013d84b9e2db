"""Trees over a model loaded with flash attention, as verl loads it on a GPU: flat calls still reach the package.

The package runs on GPUs only; a stand-in with its signature computes the same attention here.
"""

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from latent_models import latent_configs
from rows_by_torch import attend_rows
from tiny_sizes import sizes
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2MoeConfig, Qwen3Config
from transformers import modeling_flash_attention_utils as flash

from tree_kernels.tree_layout import TreeLayout
from tree_rl.models import use_tree_attention
from tree_rl.models.attention import skip_mask

ROWS = ((5, 9, 3, 8, 1), (5, 9, 3, 7, 2, 4))
CALLS: list[list[int]] = []
UNSET = dict.fromkeys(("pad_token_id", "initializer_range", "max_position_embeddings"))
SIZES = sizes(vocab_size=32, hidden_size=16, intermediate_size=32, **UNSET)
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES),
    "values_of_another_size": latent_configs()["deepseek_v3"],
}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS |= {"shared_expert_intermediate_size": 16}
WINDOW = {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 2}
MASK_WINDOW: dict[str, PretrainedConfig] = {"qwen2_moe": Qwen2MoeConfig(**SIZES, **EXPERTS, **WINDOW)}
"""Has its window in the mask alone, which flash attention does not get."""


def varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Any:
    """flash_attn_varlen_func by torch; transformers inspects the signature."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert causal and torch.equal(cu_seqlens_q, cu_seqlens_k) and dropout_p == 0.0
    CALLS.append(cu_seqlens_q.tolist())
    return attend_rows(q, k, v, CALLS[-1], softmax_scale)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model that believes in flash_attention_2."""
    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    package.flash_attn_varlen_func = varlen  # type: ignore[attr-defined]
    package.flash_attn_func = package.flash_attn_with_kvcache = None  # type: ignore[attr-defined]
    padding.pad_input = padding.unpad_input = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr(flash, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(
        {**FAMILIES, **MASK_WINDOW}[request.param], attn_implementation="sdpa"
    ).eval()
    CALLS.clear()
    return built


def packed_logits(model: Any) -> torch.Tensor:
    """Logits of the rows laid end to end, [F, vocab]."""
    ids = torch.tensor([[token for row in ROWS for token in row]])
    positions = torch.tensor([[place for row in ROWS for place in range(len(row))]])
    return model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]


def tree_logits(model: Any) -> torch.Tensor:
    """The same from a tree, in which the rows share their first three tokens."""
    ids = torch.tensor([[5, 9, 3, 7, 2, 4, 8, 1]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 3, 4]])
    layout = TreeLayout.from_subtree_end(torch.tensor([8, 8, 8, 6, 6, 6, 8, 8]))
    out = model(
        input_ids=ids, position_ids=positions, attention_mask=skip_mask("cpu"), tree_layout=layout, use_cache=False
    )
    tree_of_flat = torch.tensor([0, 1, 2, 6, 7, 0, 1, 2, 3, 4, 5])
    return out.logits[0, tree_of_flat]


def test_flat_calls_reach_flash_attention_and_trees_do_not(model: Any) -> None:
    alone = torch.cat([model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in ROWS])
    model.config._attn_implementation_internal = "flash_attention_2"
    assert use_tree_attention(model) == "flash_attention_2"
    assert use_tree_attention(model) == "flash_attention_2"
    torch.testing.assert_close(packed_logits(model), alone)
    assert CALLS == [[0, 5, 11]] * 2

    torch.testing.assert_close(tree_logits(model), alone)
    assert len(CALLS) == 2


@pytest.mark.parametrize("model", MASK_WINDOW, indirect=True)
def test_a_window_that_flash_attention_does_not_get_is_not_the_tree_s(model: Any) -> None:
    windowed = packed_logits(model)
    model.config._attn_implementation_internal = "flash_attention_2"
    rows = packed_logits(model)
    use_tree_attention(model)
    torch.testing.assert_close(tree_logits(model), rows)
    assert not torch.allclose(rows, windowed)


def test_a_failing_flat_call_leaves_the_tree_s_name_behind(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.config._attn_implementation_internal = "flash_attention_2"
    use_tree_attention(model)
    name = model.config._attn_implementation
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_varlen_func", lambda *a, **k: 1 / 0)
    with pytest.raises((ZeroDivisionError, TypeError)):
        packed_logits(model)
    assert model.config._attn_implementation == name
