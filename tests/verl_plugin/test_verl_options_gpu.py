"""On a GPU: weights and optimizer in host memory leave the gradients of rows alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import build_engine, ppo_batch, save_model, tiny_qwen3
from equivalence import actor_loss, assert_equal_runs, run, wanted_positions
from hostile_rows import shapes

from tree_rl.verl_plugin.options import TreeConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS = shapes()["branches"]
OPTIONS: tuple[dict[str, Any], ...] = (
    {"offload_policy": True},
    {"offload_policy": True, "use_no_sync_for_gradient_accumulation": False},
    {"param_offload": True, "optimizer_offload": True},
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tiny_qwen3(hidden_size=64, head_dim=64, num_hidden_layers=3))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options))
def test_weights_in_host_memory_train_as_on_rows_alone(model_path: Path, options: dict[str, Any]) -> None:
    loss, flags = actor_loss("vanilla", "token-mean"), {"calculate_entropy": True, "return_model_output": True}
    alone = ppo_batch(ROWS, use_dynamic_bsz=False, micro_batch_size_per_gpu=1, **flags)
    expected = run(build_engine(model_path, tree=None), alone, loss)
    engine = build_engine(model_path, tree=TreeConfig(mode="tree", max_tokens=17), engine=options)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(ppo_batch(ROWS, **flags), loss)
        got = {name: weight.grad.to("cuda").full_tensor().clone() for name, weight in engine.module.named_parameters()}
        norm = engine.optimizer_step()
    assert torch.isfinite(torch.tensor(float(norm)))
    gradients = {name: gradient.cuda() for name, gradient in expected["gradients"].items()}
    got_run = {**output, "gradients": got}
    assert_equal_runs({**expected, "gradients": gradients}, got_run, wanted_positions(alone).cpu(), ("log_probs",))


def test_a_reference_policy_in_host_memory_sees_what_rows_alone_see(model_path: Path) -> None:
    wanted = wanted_positions(ppo_batch(ROWS))
    outputs = []
    for tree, options in ((None, {}), (TreeConfig(mode="tree"), {"forward_only": True})):
        engine = build_engine(model_path, tree=tree, engine=options)
        with engine.eval_mode():
            outputs.append(engine.infer_batch(ppo_batch(ROWS))["model_output"]["log_probs"].values().cpu()[wanted])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=2e-5, atol=2e-5)
