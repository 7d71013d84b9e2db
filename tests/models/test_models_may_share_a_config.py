"""Models built from one config object, as a policy and its reference are: each reads trees once it is told to."""

import torch
from dense_models import SIZES
from transformers import LlamaConfig, LlamaForCausalLM

from tree_rl.models import use_tree_attention
from tree_rl.training.loss.edges import forest_log_probs
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.tree import Forest

ROWS = [[5, 6, 7, 8], [5, 6, 9, 4], [5, 6], [3]]


def test_a_second_model_of_a_config_reads_trees_too() -> None:
    config = LlamaConfig(**SIZES)
    for model in (LlamaForCausalLM(config), LlamaForCausalLM(config)):
        assert model.config is config
        expected = branch_log_probs(model, ROWS)
        flat = use_tree_attention(model)
        assert use_tree_attention(model) == flat, "a second call changes nothing"
        got = forest_log_probs(model, Forest.from_rows(ROWS), device=torch.device("cpu"))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
