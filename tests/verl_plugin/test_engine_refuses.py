"""Bad rows and unsupported settings end in an error that names the row or the key, before a model runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import VOCAB, build_engine, nested, ppo_batch, save_model, tiny_qwen3
from equivalence import actor_loss
from hostile_rows import row, tokens
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, Ministral3Config
from verl.utils import tensordict_utils as tu

from tree_rl.tree import RowError
from tree_rl.verl_plugin.compat import EngineRegistry
from tree_rl.verl_plugin.options import TreeConfig, TreeFSDPEngineConfig
from tree_rl.verl_plugin.refusals.refusal import UnsupportedFeatureError


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = save_model(tmp_path_factory.mktemp("model"), tiny_qwen3(max_position_embeddings=32))
    return build_engine(path, tree=TreeConfig(mode="tree"))


def refused(engine: Any, data: TensorDict, match: str, error: type[Exception] = RowError) -> None:
    with engine.train_mode(disable_auto_offload=True), pytest.raises(error, match=match):
        engine.forward_backward_batch(data, actor_loss("vanilla", "token-mean"))


def good_rows() -> list[Any]:
    return [row(tokens(0, 8), uid="a"), row(tokens(1, 9), uid="b")]


def with_column(name: str, tensors: list[torch.Tensor]) -> TensorDict:
    data = ppo_batch(good_rows())
    data[name] = nested(tensors)
    return data


def test_an_id_outside_the_vocabulary(engine: Any) -> None:
    rows = [*good_rows(), row([1, 2, VOCAB, 3], uid="c")]
    refused(engine, ppo_batch(rows), rf"row 2 \(uid c\): token id {VOCAB} is outside the vocabulary of {VOCAB}")


def test_a_row_longer_than_the_models_positions(engine: Any) -> None:
    rows = [*good_rows(), row(tokens(2, 33), uid="c")]
    refused(engine, ppo_batch(rows), r"row 2 \(uid c\): is longer than the model's 32 positions \(got 33\)")


def test_an_empty_row(engine: Any) -> None:
    offsets = torch.tensor([0, 8, 8])
    data = ppo_batch(good_rows())
    data["input_ids"] = torch.nested.nested_tensor_from_jagged(torch.arange(8), offsets)
    refused(engine, data, r"row 1 \(uid b\): has no tokens")


def test_a_mask_longer_than_its_row(engine: Any) -> None:
    data = with_column("loss_mask", [torch.ones(6, dtype=torch.long), torch.ones(10, dtype=torch.long)])
    refused(engine, data, r"row 1 \(uid b\): has a loss mask longer than the row \(got 10\)")


def test_a_trained_first_token(engine: Any) -> None:
    data = with_column("loss_mask", [torch.ones(8, dtype=torch.long), torch.ones(7, dtype=torch.long)])
    refused(engine, data, r"row 0 \(uid a\): trains its first token")


@pytest.mark.parametrize(
    "positions, token, got, expected",
    (
        ([0, 1, 2, 3, 0, 1, 2, 3, 4], 4, 0, 4),  # two texts packed into one row
        ([0, 1, 2, 5, 6, 7, 8, 9, 10], 3, 5, 3),  # a gap
        ([3, 4, 5, 5, 6, 7, 8, 9, 10], 3, 5, 6),  # an offset that changes on the way
        ([0, 0, 0, 1, 2, 3, 4, 5, 6], 1, 0, 1),  # padding in front that stayed in the row
    ),
)
def test_positions_that_do_not_count_the_tokens(
    engine: Any, positions: list[int], token: int, got: int, expected: int
) -> None:
    data = with_column("position_ids", [torch.arange(8), torch.tensor(positions)])
    refused(engine, data, rf"row 1 \(uid b\): position_ids holds {got} for token {token}; expected {expected}: ")


def test_positions_of_another_number_than_the_tokens(engine: Any) -> None:
    data = with_column("position_ids", [torch.arange(8), torch.arange(7)])
    refused(engine, data, r"row 1 \(uid b\): has another number of position_ids than tokens \(got 7\)")


def test_an_offset_that_a_scale_by_position_would_read(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    rope["original_max_position_embeddings"] = 4
    config = Ministral3Config(**sizes, num_key_value_heads=2, head_dim=8, vocab_size=VOCAB, rope_parameters=rope)
    engine = build_engine(save_model(tmp_path, config), tree=TreeConfig(mode="tree"))
    data = with_column("position_ids", [torch.arange(8), torch.arange(9) + 2])
    refused(engine, data, r"row 1 \(uid b\): has position_ids that do not begin at 0.* absolute \(got 2\)")


@pytest.mark.parametrize("column", ("advantages", "old_log_probs", "returns"))
def test_a_number_that_is_not_finite(engine: Any, column: str) -> None:
    data = with_column(column, [torch.zeros(6), torch.tensor([0.0, float("nan"), 0, 0, 0, 0, 0])])
    refused(engine, data, rf"row 1 \(uid b\): {column} holds nan")


def test_a_batch_that_asks_for_routes(engine: Any) -> None:
    refused(
        engine, ppo_batch(good_rows(), enable_routing_replay=True), "enable_routing_replay", UnsupportedFeatureError
    )


def test_multimodal_rows(engine: Any) -> None:
    data = ppo_batch(good_rows())
    tu.assign_non_tensor_stack(data, "multi_modal_inputs", [{}, {"pixel_values": 1}])
    refused(engine, data, "row 1 carries multimodal inputs", UnsupportedFeatureError)


def test_fsdp1_is_refused_with_the_key_to_change() -> None:
    for model_type, role in (("tree_language_model", "actor_rollout_ref.actor"), ("tree_value_model", "critic")):
        with pytest.raises(UnsupportedFeatureError, match=rf"{role}\.strategy=fsdp: .*set {role}\.strategy=fsdp2"):
            EngineRegistry.new(model_type=model_type, backend="fsdp", model_config=None, engine_config=None)


def test_dropout_of_a_loaded_adapter(tmp_path: Path) -> None:
    path, adapter = save_model(tmp_path / "model", tiny_qwen3()), tmp_path / "adapter"
    lora = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(path), lora).save_pretrained(adapter)
    loaded = {"lora_rank": 2, "lora_adapter_path": str(adapter)}
    with pytest.raises(
        UnsupportedFeatureError, match=r"lora_adapter_path=.*adapter_config\.json has lora_dropout=0\.1"
    ):
        build_engine(path, tree=TreeConfig(), model=loaded)


@pytest.mark.parametrize(
    "tree, message",
    (
        ({"scope": "group"}, r"tree\.scope='group'"),
        ({"path_weighting": "mean"}, r"tree\.path_weighting='mean'"),
        ({"router_aux_loss_coef": -1.0}, r"tree\.router_aux_loss_coef=-1\.0 with tree\.mode=auto"),
        ({"router_aux_loss_coef": 0.1, "mode": "flat"}, r"tree\.router_aux_loss_coef=0\.1 with tree\.mode=flat"),
    ),
)
def test_unknown_options_name_the_key(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeFSDPEngineConfig(tree=tree)


def test_an_attention_that_cannot_run_here_is_refused_with_its_key(tmp_path: Path) -> None:
    model_path = save_model(tmp_path, tiny_qwen3())
    with pytest.raises(ValueError, match=r"tree\.attention=flex cannot run here: .*CUDA"):
        build_engine(model_path, tree=TreeConfig(attention="flex"))


def test_engines_of_one_process_keep_their_own_attention(tmp_path: Path) -> None:
    model_path = save_model(tmp_path, tiny_qwen3())
    engines = [build_engine(model_path, tree=TreeConfig(attention=impl)) for impl in ("reference", "sdpa", "auto")]
    names = [engine.module.config._attn_implementation for engine in engines]
    assert names == ["tree_rl_over_sdpa_by_reference", "tree_rl_over_sdpa_by_sdpa", "tree_rl_over_sdpa"]
    assert [engine.attention_implementation for engine in engines] == ["reference", "sdpa", "sdpa"]
