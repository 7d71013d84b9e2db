"""The gap between vLLM's and the trainer's log-probs: none where they are the trainer's, and what was changed."""

from typing import Any

import pytest
import torch
import train_inference_gap
from transformers import AutoModelForCausalLM, LlamaConfig

from tree_rl.training.rows_alone import branch_log_probs

SIZES = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_the_gap_is_what_the_sampler_says_otherwise() -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval()
    sessions = [
        {"prompt": prompt, "drawn": drawn}
        for prompt, drawn in (([5, 6, 7], [8, 9]), ([5, 6, 7], [8, 4, 3]), ([2], [6, 6]))
    ]
    for session in sessions:
        of_row = branch_log_probs(model, [session["prompt"] + session["drawn"]]).detach()
        session["log_probs"] = of_row[len(session["prompt"]) - 1 : -1].tolist()
    same = train_inference_gap.gaps(model, sessions)
    assert same["rows_largest"] == 0 and same["rows_equal"] == 1
    assert same["trees_largest"] == pytest.approx(0, abs=1e-5)
    sessions[1]["log_probs"][2] -= 0.5
    other = train_inference_gap.gaps(model, sessions)
    for name in ("rows", "trees"):
        assert other[f"{name}_largest"] == pytest.approx(0.5, abs=1e-5)
        assert other[f"{name}_mean"] == pytest.approx(0.5 / 7, abs=1e-5)
        assert other[f"{name}_k3"] == pytest.approx((torch.tensor(0.5).exp().item() - 1.5) / 7, abs=1e-5)
