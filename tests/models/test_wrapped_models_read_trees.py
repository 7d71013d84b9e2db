"""Models that also read images run rows of text on their language model: as the whole model runs each row alone."""

import pytest
from dense_models import assert_reads_trees
from wrapped_models import wrapped_config, wrapped_model

from tree_rl.models import UnsupportedModelError, check_model

READABLE = (
    *("qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "mistral3", "ministral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
    *("qwen3_vl_moe", "glm4v", "glm46v", "glm4v_moe", "llava", "internvl", "aya_vision", "idefics3", "lfm2_vl"),
    *("llava_onevision", "got_ocr2"),
)


@pytest.mark.parametrize("family, tied", [(family, number % 2 == 0) for number, family in enumerate(READABLE)])
def test_a_forest_of_text_is_the_whole_model_on_rows_alone(family: str, tied: bool) -> None:
    assert_reads_trees(wrapped_model(wrapped_config(family, tied=tied)).double(), has_head=True)


def test_positions_that_do_not_start_at_zero_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"model_type=kosmos-2\.5\) .* start at position padding_idx \+ 1"):
        check_model(wrapped_model(wrapped_config("kosmos-2.5")))
