"""Models with Gated DeltaNets, short convolutions or Mamba 2: a forest has the log-probs and gradients of its rows run
alone through stock code; so in partitions of any size, where states, or keys and values of two sizes, cross cuts.

transformers' own float32 recurrence is off by up to tens of per cent in gate gradients that nearly cancel, so float32
trees are held against stock rows in float64.
"""

from functools import partial
from typing import Any

import pytest
import torch
from dense_models import assert_reads_trees
from equal_gradients import Run, assert_equal_gradients, gradients, with_gradients
from hybrid_models import HYBRIDS, build, float64_throughout, rows_with_prefix
from hypothesis import given, settings
from hypothesis import strategies as st
from latent_models import latent_configs
from partitioned_steps import partitioned_gradients
from peft import LoraConfig, get_peft_model
from recurrent_models import RECURRENT
from tiny_sizes import HYBRID, changed

from tree_rl.models import UnsupportedModelError, check_model, use_tree_attention
from tree_rl.training.loss.edges import forest_log_probs
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.tree.forest import Forest

FLOAT32_TOLERANCE = 2e-5
CONFIGS = HYBRIDS | RECURRENT
assert_same_gradients = partial(assert_equal_gradients, floor=1e-3)
"""One that nearly vanishes is held against the largest."""


def assert_same(got: Run, expected: Run, tolerance: float) -> None:
    torch.testing.assert_close(got[0].double(), expected[0], rtol=tolerance, atol=tolerance)
    assert_same_gradients(got[1], expected[1], tolerance)


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
    rows = rows_with_prefix(65)
    with float64_throughout():
        stock = build(CONFIGS[family], torch.float64)
        expected = with_gradients(stock, branch_log_probs(stock, rows))
    model = build(CONFIGS[family], torch.float32)
    check_model(model)
    use_tree_attention(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    got = with_gradients(model, forest_log_probs(model, Forest.from_rows(rows)))
    assert_same(got, expected, FLOAT32_TOLERANCE)


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
        expected = with_gradients(stock, branch_log_probs(stock, rows))
        got = with_gradients(on_trees, forest_log_probs(on_trees, Forest.from_rows(rows)))
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
OFFLOAD = {"relays_on_host": True}
ROWS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=12), min_size=1, max_size=5)
TWO_LAYERS = changed(HYBRIDS["qwen3_next"], num_hidden_layers=2, layer_types=HYBRID, mlp_only_layers=[0, 1])


def assert_partitions_equal_rows(model: Any, rows: list[Any], capacity: int, **options: bool) -> None:
    """Gradients of the sum of squared log-probs; `options` as in `partitioned_gradients`."""

    def loss(log_probs_F: torch.Tensor) -> torch.Tensor:
        return log_probs_F.square().sum()

    expected = gradients(model, loss(branch_log_probs(model, rows)))
    use_tree_attention(model)
    got = partitioned_gradients(model, Forest.from_rows(rows), capacity, loss, **options)
    assert_same_gradients(got, expected, 1e-10)


@pytest.mark.parametrize(
    ("family", "prefix", "capacity", "checkpointing", "options"),
    (
        *((family, 20, 3, False, {}) for family in ("qwen3_next", "lfm2", "falcon_h1", "zamba2")),
        *(("nemotron_h", 20, 16, False, {}), ("qwen3_next", 20, 5, False, {"preview": True})),
        *((family, 20, 17, False, OFFLOAD) for family in ("qwen3_next", "granite_4")),
        *((family, 30, 3, True, OFFLOAD) for family in ("qwen3_5", "nemotron_h")),
        *((family, 30, 16, True, OFFLOAD) for family in ("falcon_h1", "zamba2")),
        ("qwen3_5_moe", 30, 40, True, OFFLOAD),
        *((family, 20, 3, True, {}) for family in LATENT),
        *((family, 20, 16, False, OFFLOAD) for family in LATENT),
        *((family, 20, 10_000, False, {}) for family in LATENT),
    ),
)
def test_partitions_in_float64_equal_rows_alone(
    family: str, prefix: int, capacity: int, checkpointing: bool, options: dict[str, bool]
) -> None:
    with float64_throughout():
        model = build({**CONFIGS, **LATENT}[family], torch.float64)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        assert_partitions_equal_rows(model, rows_with_prefix(prefix), capacity, **options)


@pytest.fixture(scope="module")
def two_layers() -> Any:
    return build(TWO_LAYERS, torch.float64)


@settings(max_examples=12, deadline=None, database=None)
@given(rows=ROWS, capacity=st.integers(1, 30), seed=st.integers(0, 2**16))
def test_any_rows_any_budget(two_layers: Any, rows: list[list[int]], capacity: int, seed: int) -> None:
    with float64_throughout():
        assert_partitions_equal_rows(two_layers, rows, capacity, relays_on_host=seed % 2 == 0)
