"""Gradients reach every projection laid out token by token, whatever the number of tokens.

Laid out channel by channel, an odd number of tokens is the leading dimension of the products behind it, and BLAS then
takes kernels several times slower. Legend: N unique tokens, C channels.
"""

from functools import partial

import pytest
import torch
from hybrid_models import HYBRIDS, SIZES, build, rows_with_prefix
from transformers import PretrainedConfig, Qwen3Config

from tree_rl.models.attention import use_tree_attention
from tree_rl.training.loss.edges import forest_log_probs
from tree_rl.tree import Forest

QWEN3 = Qwen3Config(**{name: value for name, value in SIZES.items() if not name.startswith("linear")})


@pytest.mark.parametrize("config", [*HYBRIDS.values(), QWEN3], ids=[*HYBRIDS, "qwen3"])
def test_gradients_of_projections_lie_token_by_token(config: PretrainedConfig) -> None:
    model = build(config, torch.float32)
    use_tree_attention(model)
    layouts: dict[str, tuple[int, ...]] = {}

    def note(name: str, gradient: torch.Tensor) -> None:
        if not gradient.is_contiguous():
            layouts[name] = gradient.stride()

    def watch(name: str, _: torch.nn.Module, __: object, output_1NC: torch.Tensor) -> None:
        if output_1NC.requires_grad:
            watched.append(name)
            output_1NC.register_hook(partial(note, name))

    watched: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(partial(watch, name))
    forest = Forest.from_rows(rows_with_prefix(21))
    assert forest.num_unique % 8
    forest_log_probs(model, forest).sum().backward()
    assert len(watched) > 10
    assert layouts == {}
