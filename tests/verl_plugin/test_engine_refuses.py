"""Bad rows, temperatures, path weights and settings end in an error that names row or key, before a model runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import VOCAB, Row, build_engine, nested, ppo_batch, save_model, tiny_qwen3
from equivalence import LOSS
from hostile_rows import SHAPES, row, tokens, whole_batch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict
from tiny_sizes import ROPE, sizes
from transformers import AutoModelForCausalLM, Ministral3Config
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig

from tree_rl.training.rows import Rows
from tree_rl.tree import RowError
from tree_rl.verl_plugin.compat import EngineRegistry
from tree_rl.verl_plugin.engine.rows_in import LEAST_TEMPERATURE, read_rows
from tree_rl.verl_plugin.options import PATH_WEIGHT_COLUMNS, TreeConfig, TreeFSDPEngineConfig
from tree_rl.verl_plugin.refusals.refusal import UnsupportedFeatureError


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = save_model(tmp_path_factory.mktemp("model"), tiny_qwen3(max_position_embeddings=32))
    return build_engine(path, tree=TreeConfig(mode="tree"))


def refused(engine: Any, data: TensorDict, match: str, error: type[Exception] = RowError) -> None:
    with engine.train_mode(disable_auto_offload=True), pytest.raises(error, match=match):
        engine.forward_backward_batch(data, LOSS)


def batch(*more: Row, **columns: list[torch.Tensor]) -> TensorDict:
    """Two good rows and perhaps others, with columns replaced."""
    data = ppo_batch([row(tokens(0, 8), uid="a"), row(tokens(1, 9), uid="b"), *more])
    for name, column in columns.items():
        data[name] = nested(column)
    return data


def ones(*lengths: int) -> list[torch.Tensor]:
    return [torch.ones(length, dtype=torch.long) for length in lengths]


FIRST, HOLE = torch.arange(8), torch.tensor([0.0, float("nan"), 0, 0, 0, 0, 0])
EMPTY = torch.nested.nested_tensor_from_jagged(torch.arange(8), torch.tensor([0, 8, 8]))
LONG, OUTSIDE = row(tokens(2, 33), uid="c"), row([1, 2, VOCAB, 3], uid="c")
REFUSED: dict[str, tuple[TensorDict, int, str]] = {
    # name: (rows, number of the bad one, what is said of it)
    "an id outside the vocabulary": (batch(OUTSIDE), 2, rf"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
    "longer than the model's positions": (batch(LONG), 2, r"is longer than the model's 32 positions \(got 33\)"),
    "an empty row": (batch().update({"input_ids": EMPTY}), 1, "has no tokens"),
    "a mask longer than its row": (batch(loss_mask=ones(6, 10)), 1, r"has a loss mask longer than the row \(got 10\)"),
    "a trained first token": (batch(loss_mask=ones(8, 7)), 0, "trains its first token"),
    "positions of another number": (
        *(batch(position_ids=[FIRST, torch.arange(7)]), 1),
        r"has another number of position_ids than tokens \(got 7\)",
    ),
    **{
        f"{column} that is not finite": (
            *(batch(**{column: [torch.zeros(6), HOLE]}), 1),
            f"{column}: expected finite numbers, received nan{cause}",
        )
        for column, cause in (("advantages", "; is every reward"), ("old_log_probs", "$"), ("returns", "$"))
    },
    **{
        name: (
            *(batch(position_ids=[FIRST, torch.tensor(positions)]), 1),
            f"position_ids holds {got} for token {token}; expected {expected}: ",
        )
        for name, positions, token, got, expected in (
            ("two texts packed into one row", [0, 1, 2, 3, 0, 1, 2, 3, 4], 4, 0, 4),
            ("a gap in positions", [0, 1, 2, 5, 6, 7, 8, 9, 10], 3, 5, 3),
            ("an offset that changes on the way", [3, 4, 5, 5, 6, 7, 8, 9, 10], 3, 5, 6),
            ("padding in front that stayed in the row", [0, 0, 0, 1, 2, 3, 4, 5, 6], 1, 0, 1),
        )
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_rows_are_named(engine: Any, case: str) -> None:
    data, number, said = REFUSED[case]
    refused(engine, data, rf"row {number} \(uid {'abc'[number]}\): {said}")


def test_an_offset_that_a_scale_by_position_would_read(tmp_path: Path) -> None:
    rope = {**ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 4}
    config = Ministral3Config(**sizes(vocab_size=VOCAB, rope_parameters=rope))
    engine = build_engine(save_model(tmp_path, config), tree=TreeConfig(mode="tree"))
    data = batch(position_ids=[FIRST, torch.arange(9) + 2])
    refused(engine, data, r"row 1 \(uid b\): has position_ids that do not begin at 0.* absolute \(got 2\)")


def test_a_batch_that_asks_for_routes(engine: Any) -> None:
    data = batch()
    tu.assign_non_tensor(data, enable_routing_replay=True)
    refused(engine, data, "enable_routing_replay", UnsupportedFeatureError)


def test_fsdp1_is_refused_with_the_key_to_change() -> None:
    for model_type, role in (("tree_language_model", "actor_rollout_ref.actor"), ("tree_value_model", "critic")):
        with pytest.raises(UnsupportedFeatureError, match=rf"{role}\.strategy=fsdp: .*set {role}\.strategy=fsdp2"):
            EngineRegistry.new(model_type, "fsdp", None, FSDPEngineConfig(strategy="fsdp"), None, None)


def test_dropout_of_a_loaded_adapter(model_path: Path, tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model_path), lora).save_pretrained(tmp_path)
    loaded = {"lora_rank": 2, "lora_adapter_path": str(tmp_path)}
    said = r"lora_adapter_path=.*adapter_config\.json has lora_dropout=0\.1"
    with pytest.raises(UnsupportedFeatureError, match=said):
        build_engine(model_path, tree=TreeConfig(), model=loaded)


@pytest.mark.parametrize(
    "tree, message",
    (
        ({"scope": "group"}, r"tree\.scope='group'"),
        ({"path_weighting": "mean"}, r"tree\.path_weighting='mean'"),
        ({"mode": "flat", "path_weighting": "session"}, r"tree\.path_weighting=session with tree\.mode=flat"),
        *(({"reuse_log_probs": value}, "reuse_log_probs=.*: expected auto, true or f") for value in ("yes", 1, None)),
        ({"router_aux_loss_coef": -1.0}, r"tree\.router_aux_loss_coef=-1\.0 with tree\.mode=auto"),
        ({"router_aux_loss_coef": 0.1, "mode": "flat"}, r"tree\.router_aux_loss_coef=0\.1 with tree\.mode=flat"),
    ),
)
def test_unknown_options_name_the_key(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeFSDPEngineConfig(tree=tree)


def test_an_attention_that_cannot_run_here_is_refused_with_its_key(model_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tree\.attention=flex cannot run here: .*CUDA"):
        build_engine(model_path, tree=TreeConfig(attention="flex"))


def test_engines_of_one_process_keep_their_own_attention(model_path: Path) -> None:
    engines = [build_engine(model_path, tree=TreeConfig(attention=impl)) for impl in ("reference", "sdpa", "auto")]
    names = [engine.module.config._attn_implementation for engine in engines]
    assert names == ["tree_rl_over_sdpa_by_reference", "tree_rl_over_sdpa_by_sdpa", "tree_rl_over_sdpa"]
    assert [engine.attention_implementation for engine in engines] == ["reference", "sdpa", "sdpa"]


def heated(temperature: Any) -> Any:
    data = ppo_batch(SHAPES["no_common_root"]).exclude("temperature")
    if isinstance(temperature, torch.Tensor):
        return data.update({"temperature": temperature})
    tu.assign_non_tensor(data, temperature=temperature)
    return data


@pytest.mark.parametrize("wrong", (0.0, -0.5, float("nan"), float("inf"), "0.7", None))
def test_a_temperature_that_is_none_names_its_row(wrong: Any) -> None:
    with pytest.raises(RowError, match=r"row 0 .*rollout\.temperature above 0"):
        read_rows(heated(wrong), vocab_size=97, max_positions=None)
    if isinstance(wrong, float):
        with pytest.raises(RowError, match=rf"row 1 \(uid g\): .*rollout\.temperature above 0.*got {wrong}"):
            read_rows(heated(torch.tensor([1.0, wrong, 0.7])), vocab_size=97, max_positions=None)
        with pytest.raises(ValueError, match=r"temperature=.*above 0"):
            Rows.of([[1, 2, 3]], temperature=wrong)


def test_verls_least_temperature_holds() -> None:
    tiny = heated(torch.tensor([1e-9, 0.4, 1.0]))
    found = read_rows(tiny, vocab_size=97, max_positions=None).temperature_B
    assert found.tolist() == np.array([LEAST_TEMPERATURE, 0.4, 1.0], dtype=np.float32).tolist()


@pytest.mark.parametrize("wrong", (float("nan"), -0.5, 1.5))
@pytest.mark.parametrize("weighting", PATH_WEIGHT_COLUMNS)
def test_a_weight_that_is_none_names_its_row(weighting: str, wrong: float) -> None:
    data, column = whole_batch(), PATH_WEIGHT_COLUMNS[weighting]
    entries = [torch.ones(len(mask), dtype=torch.float64) for mask in data["loss_mask"].unbind()]
    entries[2][-1] = wrong
    data[column] = nested(entries)
    if (weighting, wrong) == ("custom", 1.5):
        assert read_rows(data, vocab_size=97, max_positions=None, path_weighting=weighting).weight_F is not None
        return
    with pytest.raises(RowError, match=rf"row 2 \(uid branches\): {column} holds {wrong}"):
        read_rows(data, vocab_size=97, max_positions=None, path_weighting=weighting)
    assert read_rows(data, vocab_size=97, max_positions=None).weight_F is None


def test_weights_longer_than_their_row_are_refused() -> None:
    data = whole_batch()
    data["tree_row_weights"] = nested([torch.ones(200, dtype=torch.float64) for _ in range(len(data))])
    with pytest.raises(RowError, match=r"row 0 .*more entries of tree_row_weights than tokens .got 200"):
        read_rows(data, vocab_size=97, max_positions=None, path_weighting="sep_avg")
