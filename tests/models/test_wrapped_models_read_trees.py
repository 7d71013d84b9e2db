"""Models that also read images run rows of text on their language model: as the whole model runs each row alone."""

import pytest
from dense_models import assert_reads_trees
from peft import LoraConfig, get_peft_model
from wrapped_models import WRAPPED, wrapped_config, wrapped_model

from tree_rl.models import UnsupportedModelError, check_model
from tree_rl.training.memory.offloaded_inputs import checkpointed_layers

READABLE = [family for family in WRAPPED if family not in ("kosmos-2.5", "llama4", "paligemma", "mllama")]


@pytest.mark.parametrize("family, tied", [(family, number % 2 == 0) for number, family in enumerate(READABLE)])
def test_a_forest_of_text_is_the_whole_model_on_rows_alone(family: str, tied: bool) -> None:
    assert_reads_trees(wrapped_model(wrapped_config(family, tied=tied)).double(), has_head=True)


@pytest.mark.parametrize("has_adapter", (False, True))
def test_layers_whose_inputs_wait_on_the_host_are_the_language_models(has_adapter: bool) -> None:
    model = wrapped_model(wrapped_config("qwen2_5_vl"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = checkpointed_layers(get_peft_model(model, LoraConfig(target_modules=["q_proj"])) if has_adapter else model)
    assert found == list(model.model.language_model.layers)


def test_positions_that_do_not_start_at_zero_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"model_type=kosmos-2\.5\) .* start at position padding_idx \+ 1"):
        check_model(wrapped_model(wrapped_config("kosmos-2.5")))
