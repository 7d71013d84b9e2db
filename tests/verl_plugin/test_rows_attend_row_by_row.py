"""The flat arm of the learning benchmark: verl's engine attends row by row, and sees what it sees of rows alone."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from engine_harness import build_engine, ppo_batch, save_model, tiny_qwen3
from equivalence import actor_loss, assert_equal_runs, run, wanted_positions
from hostile_rows import shapes
from transformers import LlamaConfig

from tree_rl.benchmark.against_verl.without_flash_attention_2 import fused_log_probs
from tree_rl.verl_plugin.compat import transformer_impl


@pytest.fixture(scope="module")
def rows() -> Iterator[ModuleType]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    before = transformer_impl.logprobs_from_logits
    import swe_learning_rows

    yield swe_learning_rows
    transformer_impl.logprobs_from_logits = before


def test_log_probs_take_one_pass(rows: ModuleType) -> None:
    assert transformer_impl.logprobs_from_logits is fused_log_probs


def llama() -> LlamaConfig:
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6}
    return LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=97, initializer_range=0.2, tie_word_embeddings=True)


@pytest.mark.parametrize("config", [tiny_qwen3(), llama()], ids=["qwen3", "llama"])
def test_packed_rows_are_rows_alone(
    rows: ModuleType, config: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model(tmp_path, config)  # type: ignore[arg-type]
    alone = build_engine(path, tree=None)
    packed = build_engine(path, tree=None, attention=rows.NAME)
    called = []
    original = rows.packed_attention
    monkeypatch.setattr(
        rows, "packed_attention", lambda *given, **more: called.append(given) or original(*given, **more)
    )
    loss, shape = actor_loss("vanilla", "token-mean"), shapes()["two_groups"]
    flags = {"calculate_entropy": True, "return_model_output": True}
    one_by_one = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
    expected = run(alone, ppo_batch(shape, **flags, **one_by_one), loss)
    assert not called
    received = run(packed, ppo_batch(shape, **flags), loss)
    assert len(called) >= 2 and any(len(given[3].lengths) == len(shape) for given in called), "rows end to end"
    assert_equal_runs(expected, received, wanted_positions(ppo_batch(shape)), ("log_probs", "entropy"))


def test_padded_rows_are_refused_with_the_key(rows: ModuleType) -> None:
    with pytest.raises(ValueError, match="use_remove_padding=true"):
        rows.layout_of(torch.arange(4).expand(2, 4))
    assert rows.layout_of(torch.tensor([[0, 1, 2, 0, 0, 1]])).lengths == [3, 1, 2]
