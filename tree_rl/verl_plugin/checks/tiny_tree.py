"""A check that takes seconds: compares a small forest in a small random model with its rows one by one."""

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tree_rl.models import use_edge_head, use_tree_attention
from tree_rl.training.loss.edges import forest_log_probs
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.tree import Forest

LOG_PROB_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 4e-5
VOCABULARY = 97


class TreeError(RuntimeError):
    """The tree differs from its rows by more than rounding."""


def measure_tree_error() -> tuple[float, float]:
    """Run a float32 Qwen3 of two layers on the CPU over branching rows, as a tree and row by row.

    Returns the largest absolute difference of log-probs and the largest relative difference (norm) of a parameter's
    gradient; raises a TreeError if one exceeds its tolerance.
    """
    model = _tiny_model()
    rows = _branching_rows()
    alone_F = branch_log_probs(model, rows)
    gradients_alone = _gradients(model, alone_F)
    use_tree_attention(model)
    use_edge_head(model)
    tree_F = forest_log_probs(model, Forest.from_rows(rows))
    gradients_tree = _gradients(model, tree_F)
    log_prob_error = float((tree_F - alone_F).detach().abs().max())
    gradient_error = max(
        float((tree - alone).norm() / alone.norm()) for tree, alone in zip(gradients_tree, gradients_alone, strict=True)
    )
    if not (log_prob_error <= LOG_PROB_TOLERANCE and gradient_error <= GRADIENT_TOLERANCE):
        raise TreeError(
            f"log-probs differ by {log_prob_error:.1e} (expected {LOG_PROB_TOLERANCE:.0e}), gradients by "
            f"{gradient_error:.1e} (expected {GRADIENT_TOLERANCE:.0e}): do not train with this installation"
        )
    return log_prob_error, gradient_error


def _tiny_model() -> Qwen3ForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=128,
            attn_implementation="sdpa",
        )
        return Qwen3ForCausalLM(config).float()


def _branching_rows() -> list[list[int]]:
    """Branches at two depths, a row that is a prefix of another, twin rows, and a row that shares nothing."""
    tokens = np.random.default_rng(0).permutation(VOCABULARY)
    trunk, left, right, twig, other = (part.tolist() for part in np.split(tokens, [30, 50, 65, 80]))
    return [trunk + left, trunk + right, trunk + right[:7] + twig, trunk[:20], trunk + left, other]


def _gradients(model: Qwen3ForCausalLM, log_probs_F: torch.Tensor) -> list[torch.Tensor]:
    """Gradient of each parameter for a loss with a different weight for every row token."""
    weight_F = torch.linspace(-1.0, 2.0, len(log_probs_F))
    return list(torch.autograd.grad((weight_F * log_probs_F).sum(), list(model.parameters())))
