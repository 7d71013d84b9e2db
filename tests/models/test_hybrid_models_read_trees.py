"""Models with Gated DeltaNets, short convolutions or Mamba 2: a forest has the log-probs and gradients of its rows run
alone through stock code; so in partitions of any size, where states, or keys and values of two sizes, cross cuts.

transformers' own float32 recurrence is off by up to tens of per cent in gate gradients that nearly cancel, so float32
trees are held against stock rows in float64.
"""

import copy
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from dense_models import assert_reads_trees
from equal_gradients import assert_equal_gradients
from hybrid_models import HYBRIDS, VOCAB, build, float64_throughout, rows_with_prefix
from hypothesis import given, settings
from hypothesis import strategies as st
from latent_models import latent_configs
from partitioned_steps import partitioned_gradients
from peft import LoraConfig, get_peft_model
from recurrent_models import RECURRENT
from transformers import AutoModelForCausalLM, Mamba2Config, MiniMaxConfig, Qwen3NextConfig

from tree_rl.models import UnsupportedModelError, check_model, use_tree_attention
from tree_rl.training.loss.edges import forest_log_probs
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.tree.forest import Forest

FLOAT32_TOLERANCE = 2e-5
CONFIGS = HYBRIDS | RECURRENT
Gradients = dict[str, torch.Tensor]
Result = tuple[torch.Tensor, Gradients]
"""Log-probs and gradients."""


def gradients(model: Any, log_probs_F: torch.Tensor) -> Result:
    weight_F = torch.from_numpy(np.random.default_rng(1).normal(size=len(log_probs_F)))
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    loss = (log_probs_F * weight_F.to(log_probs_F.dtype)).sum()
    return log_probs_F.detach(), dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True))


@cache
def stock_rows_in_float64(family: str, prefix: int) -> Result:
    with float64_throughout():
        model = build(CONFIGS[family], torch.float64)
        return gradients(model, branch_log_probs(model, rows_with_prefix(prefix)))


def tree(family: str, prefix: int, dtype: torch.dtype, *, checkpointing: bool = False) -> Result:
    model = build(CONFIGS[family], dtype)
    check_model(model)
    use_tree_attention(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return gradients(model, forest_log_probs(model, Forest.from_rows(rows_with_prefix(prefix))))


def assert_same(got: Result, expected: Result, tolerance: float) -> None:
    torch.testing.assert_close(got[0].double(), expected[0], rtol=tolerance, atol=tolerance)
    assert_same_gradients(got[1], expected[1], tolerance)


assert_same_gradients = partial(assert_equal_gradients, floor=1e-3)
"""One that nearly vanishes is held against the largest."""


def row_gradients(model: Any, rows: list[Any]) -> Gradients:
    """Of the sum of squared log-probs, every row alone."""
    parameters = dict(model.named_parameters())
    loss = branch_log_probs(model, rows).square().sum()
    gradients = torch.autograd.grad(loss, parameters.values(), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


def partitioned(
    model: Any, rows: list[Any], capacity: int, *, offload: bool = False, preview: bool = False
) -> Gradients:
    """The same through one partitioned step."""

    def loss(log_probs_F: torch.Tensor) -> torch.Tensor:
        return log_probs_F.square().sum()

    return partitioned_gradients(model, Forest.from_rows(rows), capacity, loss, preview=preview, relays_on_host=offload)


def assert_partitions_equal_rows(
    config: Any, rows: list[Any], capacity: int, *, checkpointing: bool = False, **options: bool
) -> None:
    """In float64; `options` as in `partitioned`."""
    with float64_throughout():
        model = build(config, torch.float64)
        expected = row_gradients(model, rows)
        use_tree_attention(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        assert_same_gradients(partitioned(model, rows, capacity, **options), expected, 1e-10)


@pytest.mark.parametrize(
    ("family", "prefix"),
    [
        *((family, 65) for family in CONFIGS),
        *(("qwen3_next", prefix) for prefix in (1, 3, 64)),
        *(("lfm2", 1), ("bamba", 3), ("nemotron_h", 1), ("falcon_h1", 3), ("zamba2", 1)),
    ],
)
def test_forest_in_float64_equals_rows_alone(family: str, prefix: int) -> None:
    assert_reads_trees(build(CONFIGS[family], torch.float64), rows_with_prefix(prefix))


@pytest.mark.parametrize(
    "family", ("qwen3_5_moe", "lfm2_moe", "granite_4", "nemotron_h", "falcon_h1", "falcon_h1_gate_only", "zamba2")
)
def test_forest_in_float32_with_checkpointing_equals_rows_alone(family: str) -> None:
    got = tree(family, 65, torch.float32, checkpointing=True)
    assert_same(got, stock_rows_in_float64(family, 65), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("family", ("bamba", "nemotron_h", "falcon_h1", "zamba2"))
def test_adapters_in_float64_equal_rows_alone(family: str) -> None:
    rows = rows_with_prefix(20)

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        # PEFT refuses out_proj in Mamba layers.
        targets = ["in_proj", "q_proj", "v_proj", "up_proj", "gate_up_proj", "down_proj"]
        return get_peft_model(model, LoraConfig(target_modules=targets, init_lora_weights=False)).double()

    with float64_throughout():
        stock, on_trees = (build(CONFIGS[family], torch.float64) for _ in range(2))
        use_tree_attention(on_trees)
        stock, on_trees = adapted(stock), adapted(on_trees)
        expected = gradients(stock, branch_log_probs(stock, rows))
        got = gradients(on_trees, forest_log_probs(on_trees, Forest.from_rows(rows)))
    assert any(float(gradient.norm()) for name, gradient in expected[1].items() if "in_proj.lora_A" in name)
    assert_same(got, expected, 1e-10)


@pytest.mark.parametrize("family", ("qwen3_next", "lfm2", "bamba", "nemotron_h", "falcon_h1", "zamba2"))
def test_flat_calls_run_transformers_own_code(family: str) -> None:
    model = build(CONFIGS[family], torch.float32)
    ids = torch.from_numpy(rows_with_prefix(20)[1])[None]
    before = model(input_ids=ids).logits
    use_tree_attention(model)
    use_tree_attention(model)
    forest_log_probs(model, Forest.from_rows(rows_with_prefix(3)))
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=0, atol=0)


def test_a_failing_layer_leaves_transformers_own_functions_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(HYBRIDS["qwen3_next"], torch.float32)
    mixer = model.model.layers[1].linear_attn
    stock = mixer.chunk_gated_delta_rule
    use_tree_attention(model)
    with monkeypatch.context() as patch:
        patch.setattr(mixer.norm, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forest_log_probs(model, Forest.from_rows(rows_with_prefix(3)))
    assert mixer.chunk_gated_delta_rule is stock and mixer.causal_conv1d_fn is None


SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
REFUSED = {
    "Mamba2Mixer": Mamba2Config(**SMALL, num_heads=4, head_dim=16, state_size=8, n_groups=1),
    "MiniMaxLightningAttention": MiniMaxConfig(
        **SMALL,
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        layer_types=["linear_attention", "full_attention"],
    ),
}


@pytest.mark.parametrize("mixer", REFUSED)
def test_other_recurrent_layers_are_refused_by_name(mixer: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"layers\.0\.\S+ is a {mixer}.* that are: BambaMixer, .*Lfm2"):
        check_model(AutoModelForCausalLM.from_config(REFUSED[mixer]))


@pytest.mark.parametrize("family", ("qwen3_next", "bamba"))
def test_a_convolution_with_another_activation_is_refused_by_name(family: str) -> None:
    config = copy.deepcopy(CONFIGS[family])
    config.hidden_act = "gelu"
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.\S+ applies gelu to its convolution"):
        check_model(build(config, torch.float32))


class KimiDeltaAttention(torch.nn.Module):
    """Comes with the checkpoint's own code: its decay is a vector, not a number per head."""


def other_forward(self: Any, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
    return hidden_states


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("qwen3_next", "no exposed functions", r"is a Qwen3NextGatedDeltaNet.*transformers >=5"),
        ("qwen3_5", "other functions", "Qwen3_5GatedDeltaNet, whose state is not followed along trees"),
        ("qwen3_next", "Kimi", r"layers\.0\.linear_attn is a KimiDeltaAttention, whose state"),
    ],
)
def test_a_gated_delta_net_of_another_kind_is_refused_by_name(
    family: str, change: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(HYBRIDS[family], torch.float32)
    layer = model.model.layers[0]
    if change == "no exposed functions":
        del layer.linear_attn.causal_conv1d_fn
    elif change == "other functions":
        # As another release of transformers defines the class; what a library puts in its place is not run on trees.
        monkeypatch.setattr(other_forward, "__module__", type(layer.linear_attn).__module__)
        monkeypatch.setattr(type(layer.linear_attn), "forward", other_forward)
    else:
        layer.linear_attn = KimiDeltaAttention()
    with pytest.raises(UnsupportedModelError, match=named):
        check_model(model)


LATENT = latent_configs(initializer_range=0.1)
ROWS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=12), min_size=1, max_size=5)
TWO_LAYERS = Qwen3NextConfig(
    **{
        **HYBRIDS["qwen3_next"].to_dict(),
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_only_layers": [0, 1],
    }
)


@pytest.mark.parametrize(
    ("family", "capacity"),
    (
        *(("qwen3_next", capacity) for capacity in (3, 5, 17)),
        *(("lfm2", 3), ("granite_4", 17), ("nemotron_h", 16), ("falcon_h1", 3), ("zamba2", 3)),
    ),
)
def test_every_budget_in_float64(family: str, capacity: int) -> None:
    rows, preview, offload = rows_with_prefix(20), capacity == 5, capacity == 17
    assert_partitions_equal_rows(CONFIGS[family], rows, capacity, preview=preview, offload=offload)


@pytest.mark.parametrize(
    ("family", "capacity"), (("qwen3_5", 3), ("qwen3_5_moe", 40), ("nemotron_h", 3), ("falcon_h1", 16), ("zamba2", 16))
)
def test_other_families_with_checkpointing_and_offloading(family: str, capacity: int) -> None:
    assert_partitions_equal_rows(CONFIGS[family], rows_with_prefix(30), capacity, checkpointing=True, offload=True)


@pytest.mark.parametrize("capacity", (3, 16, 10_000))
@pytest.mark.parametrize("family", LATENT)
def test_every_budget_of_latent_attention(family: str, capacity: int) -> None:
    checkpointing, offload = capacity == 3, capacity == 16
    assert_partitions_equal_rows(
        LATENT[family], rows_with_prefix(20), capacity, checkpointing=checkpointing, offload=offload
    )


@pytest.fixture(scope="module")
def two_layers() -> Any:
    return build(TWO_LAYERS, torch.float64)


@settings(max_examples=12, deadline=None, database=None)
@given(rows=ROWS, capacity=st.integers(1, 30), seed=st.integers(0, 2**16))
def test_any_rows_any_budget(two_layers: Any, rows: list[list[int]], capacity: int, seed: int) -> None:
    with float64_throughout():
        expected = row_gradients(two_layers, rows)
        use_tree_attention(two_layers)
        got = partitioned(two_layers, rows, capacity, offload=seed % 2 == 0)
        assert_same_gradients(got, expected, 1e-10)
