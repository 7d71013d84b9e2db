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
        # Each is fed what those before it gave here, in place of vLLM's.
        for name, values in operations_of_vllm.of_trainer(model, ROW, seen):
            seen[name] = values
            if name.endswith(".projected"):
                seen[name.replace("projected", "value")] = values[:, -2 * 8 :]
        assert seen["log_probs"] == pytest.approx(branch_log_probs(model, [ROW])[:-1], abs=1e-6)


def test_an_operation_that_differs_is_named_with_its_first_layer_and_its_share() -> None:
    wanted = {"embedding": torch.ones(4, 3), **{f"{layer}.norm": torch.full((4, 3), 2.0) for layer in range(3)}}
    wanted |= {"last_norm": torch.ones(4, 3)}
    received = {name: values.clone() for name, values in wanted.items()}
    received["1.norm"][2, 1] += 0.25
    received["2.norm"][:2] -= 0.5
    received["last_norm"][0, 0] = float("nan")
    found = [operations_of_vllm.differences(name, values, wanted[name]) for name, values in received.items()]
    named = ("operation", "differ", "first_layer", "largest", "largest_value")
    lines = [[line[name] for name in named] for line in operations_of_vllm.summary("trainer", found)]
    assert lines == [
        ["embedding", 0, "", 0, 1],
        ["norm", pytest.approx(7 / 36), "1", 0.5, 2],
        ["last_norm", pytest.approx(1 / 12), "all", pytest.approx(float("nan"), nan_ok=True), 1],
    ]
