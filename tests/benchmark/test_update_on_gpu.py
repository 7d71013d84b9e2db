"""On a GPU an update over trees never stops for the host inside a layer, needs no more memory than packed rows of as
many tokens, and its bf16 gradient is no further from float32 than theirs.
"""

import pytest
import torch

from tree_rl.benchmark.against_packed.gradient_check import check_gradients
from tree_rl.benchmark.against_packed.packed_updates import compare
from tree_rl.benchmark.against_packed.profiled_update import profile_update
from tree_rl.benchmark.against_packed.random_model import build_model, build_optimizer
from tree_rl.benchmark.against_packed.update import PACKED, packed_planner, tree_planner, update
from tree_rl.benchmark.batch import agent_batch
from tree_rl.benchmark.comparison import TREE
from tree_rl.cost.model_sizes import MODEL_SIZES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
# Several forwards per update: what one still computes must not stop the planning of the next.
PLANNERS = {TREE: tree_planner(8_000, CUDA), PACKED: packed_planner(8_000, CUDA)}
MODELS = (("qwen3.5-4b", 4), ("qwen3-30b-a3b", 2), ("deepseek-v2-lite", 2), ("glm-4.7-flash", 2))


@pytest.mark.parametrize(("name", "layers"), MODELS)
def test_gradients_of_hybrid_and_sparse_models_are_no_further_off_than_those_of_packed_rows(
    name: str, layers: int
) -> None:
    size = MODEL_SIZES[name].with_layers(layers)
    model = build_model(size, device=CUDA, dtype=torch.bfloat16)
    batch = agent_batch(por=0.7, num_rows=8, row_tokens=500, num_groups=1, trained_share=0.3, vocab=size.shape.vocab)
    gradients = check_gradients(model, batch, *PLANNERS.values())
    assert gradients.tree <= gradients.limit < 0.1


@pytest.mark.parametrize("por", [0.0, 0.7])
def test_update_is_exact_asynchronous_and_no_larger(por: float) -> None:
    size = MODEL_SIZES["0.6b"].with_layers(2)
    model = build_model(size, device=CUDA, dtype=torch.bfloat16)
    optimizer = build_optimizer(model, lr=1e-6)
    batch = agent_batch(por=por, num_rows=8, row_tokens=1_000, num_groups=2, trained_share=0.3, vocab=size.shape.vocab)
    comparison = compare(model, optimizer, batch, PLANNERS, repeats=2)
    assert comparison.errors.tree <= comparison.errors.limit < 0.1
    peak = {side: max(times.peak_bytes for times in comparison.times[side]) for side in PLANNERS}
    assert peak[TREE] <= 1.02 * peak[PACKED]
    waits_in_layers, _ = profile_update(model, lambda: update(model, optimizer, batch, PLANNERS[TREE]))
    assert waits_in_layers == 0
