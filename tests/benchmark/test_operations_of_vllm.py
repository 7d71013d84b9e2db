"""The operations that are compared with vLLM's: together they are the model, and one that differs is named."""

import operations_of_vllm
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tree_rl.training.rows_alone import branch_log_probs

ROW = [5, 6, 7, 8, 9, 4, 3, 12, 19]


def test_the_operations_one_after_the_other_are_the_model() -> None:
    sizes = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads)).eval()
    seen: operations_of_vllm.Seen = {}
    with torch.no_grad():
        for name, values in operations_of_vllm.of_trainer(model, ROW, seen):
            seen[name] = values
            if name.endswith(".projected"):
                seen[name.replace("projected", "value")] = values[:, -16:]
        assert seen["log_probs"] == pytest.approx(branch_log_probs(model, [ROW])[:-1], abs=1e-6)
    assert len(seen) == 1 + 2 * 9 + 2


def test_an_operation_that_differs_is_named_with_its_first_layer_and_its_share() -> None:
    wanted = {"embedding": torch.ones(4, 3), "0.norm": torch.ones(4, 3), "1.norm": 2 * torch.ones(4, 3)}
    received = {name: values.clone() for name, values in wanted.items()}
    received["1.norm"][2, 1] += 0.5
    found = [operations_of_vllm.differences(name, values, wanted[name]) for name, values in received.items()]
    assert operations_of_vllm.summary("trainer", found) == [
        {"side": "trainer", "operation": "embedding", "differ": 0, "first_layer": "", "largest": 0, "of": 1},
        {"side": "trainer", "operation": "norm", "differ": pytest.approx(1 / 24), "first_layer": "1"}
        | {"largest": 0.5, "of": 2},
    ]
