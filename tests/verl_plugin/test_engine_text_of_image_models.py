"""Published checkpoints that also read images train on rows of text in verl's FSDP2 engine as stock verl does on rows
alone: `*ForConditionalGeneration`, loaded by verl's own way, whole and cut."""

from pathlib import Path

import pytest
import torch
from engine_harness import BFLOAT16, FLAGS, build_engine, nested, ppo_batch
from equivalence import LOSS, assert_equal_gradients, run
from hostile_rows import SHAPES
from tensordict import TensorDict
from tiny_families import assert_trains
from verl.utils import tensordict_utils as tu
from wrapped_models import wrapped_config, wrapped_model

from tree_rl.verl_plugin.options import TreeConfig
from tree_rl.verl_plugin.refusals.refusal import UnsupportedFeatureError

SLOW = ("qwen3_vl_moe", "gemma3", "mistral3", "qwen3_vl", "glm46v", "gemma4", "internvl", "lfm2_vl")
"""That they read trees is proven without an engine; here they are loaded by verl's own way."""


def save(path: Path, family: str) -> Path:
    wrapped_model(wrapped_config(family)).save_pretrained(path)
    return path


def with_axes(data: TensorDict) -> TensorDict:
    """Positions as verl's agent loop gives them to models with rotary axes: of text, and of an image's three."""
    rows = [torch.arange(len(ids)).expand(4, -1).contiguous() for ids in data["input_ids"].unbind()]
    data["position_ids"] = nested(rows)
    return data


def with_type_ids(data: TensorDict, key: str, row_with_image: int | None = None) -> TensorDict:
    """Rows as a processor returns them: 0 for each token of a text, 1 for those of an image."""
    ids = [{key: torch.zeros(1, len(one), dtype=torch.long)} for one in data["input_ids"].unbind()]
    if row_with_image is not None:
        ids[row_with_image][key][0, 1] = 1
    tu.assign_non_tensor_stack(data, "multi_modal_inputs", ids)
    return data


@pytest.mark.parametrize("family", ("qwen3_5", *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)))
def test_an_update_whole_and_in_partitions(tmp_path: Path, family: str) -> None:
    assert_trains(save(tmp_path, family), ("branches",))


def test_gradients_of_bf16_wait_for_the_last_partition_where_the_tower_never_ran(tmp_path: Path) -> None:
    path, gradients = save(tmp_path, "qwen3_5"), []
    for waits in (True, False):
        options = {"mixed_precision": BFLOAT16, "use_no_sync_for_gradient_accumulation": waits}
        tree = build_engine(path, tree=TreeConfig(mode="tree", max_tokens=16), engine=options)
        gradients.append(run(tree, ppo_batch(SHAPES["branches"], **FLAGS), LOSS)["gradients"])
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, rtol=0, atol=0)


@pytest.mark.parametrize(("family", "key"), (("gemma3", "token_type_ids"), ("qwen3_5", "mm_token_type_ids")))
def test_rows_that_say_they_are_text_train_and_images_are_refused(tmp_path: Path, family: str, key: str) -> None:
    tree = build_engine(save(tmp_path, family), tree=TreeConfig(mode="auto", max_tokens=1000))
    plain = run(tree, ppo_batch(SHAPES["branches"], **FLAGS), LOSS)
    said = run(tree, with_axes(with_type_ids(ppo_batch(SHAPES["branches"], **FLAGS), key)), LOSS)
    assert_equal_gradients(plain["gradients"], said["gradients"])
    assert 0 < plain["metrics"]["tree/self_check_error"].aggregate() < 1e-4
    with pytest.raises(UnsupportedFeatureError, match=rf"row 1 carries multimodal inputs.* \({key}\); trees run rows"):
        run(tree, with_type_ids(ppo_batch(SHAPES["branches"], **FLAGS), key, row_with_image=1), LOSS)
    data = with_axes(ppo_batch(SHAPES["branches"], **FLAGS))
    data["position_ids"].unbind()[2][1:] += 1
    with pytest.raises(UnsupportedFeatureError, match=r"row 2 (carries|has no image, but) position_ids"):
        run(tree, data, LOSS)
