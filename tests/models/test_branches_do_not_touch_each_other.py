"""Sibling isolation: other tokens in one branch leave every other branch's log-probs and gradients bitwise as they are.

The gradients are those of what each token feeds into the first layer, of a loss that sums over rows. Experts run one
product per token (batched_mm): where tokens of one expert share a product, their number decides how a library sums,
with trees or without.
"""

import numpy as np
import pytest
import torch
from dense_models import FAMILIES as DENSE
from hybrid_models import HYBRIDS, VOCAB
from moe_models import FAMILIES, build
from recurrent_models import RECURRENT

from tree_rl.models import use_tree_attention
from tree_rl.models.tree_inputs import TreeInputs
from tree_rl.training.loss.edges import plan_edges, tree_log_probs, wanted_everywhere
from tree_rl.tree.forest import Forest

CHANGED, TRUNK = 1, 21
MODELS = DENSE | FAMILIES | HYBRIDS | RECURRENT
EXPERTS = ("qwen3_moe", "gpt_oss", "qwen3_next", "nemotron_h")


def rows(seed: int) -> list[np.ndarray]:
    """A trunk under four branches, one of them with a fork of its own; the seed draws the second."""
    draw, other = np.random.default_rng(0), np.random.default_rng(seed)
    trunk = draw.integers(1, VOCAB, TRUNK)
    # First tokens differ, so that the forest keeps its shape whatever follows.
    tails = [np.append(branch + 1, draw.integers(1, VOCAB, size)) for branch, size in enumerate((9, 0, 30, 4))]
    tails[CHANGED] = np.append(tails[CHANGED], other.integers(1, VOCAB, 17))
    branches = [np.concatenate([trunk, tail]) for tail in tails]
    return [*branches, np.append(branches[2][:-5], [VOCAB - 1, 7])]


def outputs_and_gradients(name: str, seed: int) -> list[torch.Tensor]:
    """Log-probs of the changed row, then of all others with the gradients at their tokens behind the trunk."""
    experts = "batched_mm" if name in EXPERTS else "eager"
    attention = "eager" if name == "gpt_oss" else "sdpa"
    model = build(MODELS[name], attention=attention, experts=experts)
    use_tree_attention(model)
    forest = Forest.from_rows(rows(seed))
    embedded: list[torch.Tensor] = []
    model.get_input_embeddings().register_forward_hook(lambda _, args, out: embedded.append(out))
    edges = plan_edges(forest, wanted_everywhere(forest), np.ones(forest.num_rows, dtype=np.float32))
    inputs = TreeInputs.from_forest(forest)
    log_probs_F = tree_log_probs(model, inputs, lambda: edges)["log_probs"]
    (gradient,) = torch.autograd.grad(log_probs_F.square().sum(), embedded[0])
    kept = []
    for row in range(forest.num_rows):
        span = slice(*forest.row_index.offsets[row : row + 2].tolist())
        if row != CHANGED:
            kept += [log_probs_F[span], gradient[0, forest.row_index[row][TRUNK:]]]
    changed = slice(*forest.row_index.offsets[CHANGED : CHANGED + 2].tolist())
    return [log_probs_F[changed], *kept]


@pytest.mark.parametrize("name", ("qwen3", "qwen3_5", "lfm2", "bamba", "falcon_h1", "zamba2", *EXPERTS))
def test_another_branch_changes_no_bit(name: str) -> None:
    one, two = (outputs_and_gradients(name, seed) for seed in (1, 2))
    assert not torch.equal(one[0], two[0])
    for first, second in zip(one[1:], two[1:], strict=True):
        assert first.abs().max() > 0 and torch.equal(first, second)
