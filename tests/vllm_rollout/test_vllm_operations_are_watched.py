"""What vLLM's own Llama computes is watched; its projections and MLP give the bits of transformers'."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gateway_harness import build_tokenizer
from tiny_sizes import sizes
from transformers import AutoModelForCausalLM, LlamaConfig
from vllm_harness import environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "operations_of_vllm.py"
OF_BOTH = ["embedding", "norm", "projected", "rotated", "attended", "output", "mlp_norm", "gate_up", "mlp", "last_norm"]


def test_every_operation_is_near_and_products_of_matrices_are_equal(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    usual = sizes(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, head_dim=32)
    AutoModelForCausalLM.from_config(LlamaConfig(**usual)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    data, output = tmp_path / "rows.jsonl", tmp_path / "operations.csv"
    data.write_text(json.dumps({"input_ids": torch.randint(3, 90, [40]).tolist()}))
    command = [sys.executable, str(SCRIPT), str(output), "--model", str(tmp_path), "--data", str(data)]
    options = ["--prompt-tokens", "40", "--tokens", "5"]
    subprocess.run([*command, *options], check=True, env=os.environ | environment(), timeout=280)
    lines = list(csv.DictReader(output.read_text().splitlines()))
    trainer = {line["operation"]: line for line in lines if line["side"] == "trainer"}
    assert list(trainer) == [*OF_BOTH, "log_probs"]
    of_vllm = {line["operation"] for line in lines if line["side"] == "vllm"}
    assert of_vllm == {*OF_BOTH, "value", "activated", "log_probs"}
    assert {line["tokens"] for line in lines} == {"45"} and {line["drawn"] for line in lines} == {"5"}
    for operation in ("embedding", "projected", "output", "gate_up", "mlp", "log_probs"):
        assert float(trainer[operation]["differ"]) == 0
    for line in lines:
        # Two units in the last place of bf16, of a layer's largest value.
        assert float(line["largest"]) <= 2**-6 * float(line["largest_value"])
