"""What users switch on around the engine changes nothing: checkpointing, LoRA, untied heads, budgets, modes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import build_engine, ppo_batch, save_model, tiny_qwen3
from equivalence import actor_loss, alone, assert_trains_as, wanted_positions
from hostile_rows import SHAPES

from tree_rl.models.edge_head import EdgeHead
from tree_rl.verl_plugin.options import TreeConfig


def compare_built(path: Path, name: str, *, tree: TreeConfig | None = None, **build: Any) -> dict[str, Any]:
    """Build both engines with the same settings and compare one update; returns the tree run."""
    stock, engine = (build_engine(path, tree=options, **build) for options in (None, tree or TreeConfig(mode="tree")))
    return assert_trains_as(alone(stock, SHAPES[name]), engine, SHAPES[name])


@pytest.mark.parametrize(("max_tokens", "forwards", "reshard"), ((1000, 1, True), (7, 6, False)))
def test_an_untied_head_answers_every_forward_with_log_probs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_tokens: int, forwards: int, reshard: bool
) -> None:
    answers: list[str] = []
    forward = EdgeHead.forward

    def watching(head: EdgeHead, hidden: torch.Tensor) -> Any:
        answer = forward(head, hidden)
        answers.append(type(answer).__name__)
        return answer

    monkeypatch.setattr(EdgeHead, "forward", watching)
    path = save_model(tmp_path, tiny_qwen3(tie_word_embeddings=False))
    tree = TreeConfig(mode="tree", max_tokens=max_tokens, self_check=False)
    got = compare_built(path, "branches", tree=tree, engine={"reshard_after_forward": reshard})
    assert any(name.endswith("lm_head.weight") for name in got["gradients"])
    assert got["metrics"]["tree/partitions"].aggregate() == forwards and answers == ["EdgeValues"] * forwards


@pytest.mark.parametrize("sync_every_micro_batch, max_tokens, partitions", ((True, 17, 4), (False, 3, 14)))
def test_gradient_accumulation_over_small_budgets(
    model_path: Path, sync_every_micro_batch: bool, max_tokens: int, partitions: int
) -> None:
    got = compare_built(
        model_path,
        "two_groups",
        tree=TreeConfig(mode="tree", max_tokens=max_tokens),
        engine={"use_no_sync_for_gradient_accumulation": not sync_every_micro_batch},
    )
    # Two groups of two rows with a trunk of 12 tokens and 4 more each: 20 unique tokens a group, none computed twice.
    assert len(got["loss"]) == 2
    assert got["metrics"]["tree/unique_tokens"].aggregate() == 40
    assert got["metrics"]["tree/partitions"].aggregate() == partitions


def test_rows_without_trees_train_the_same(model_path: Path) -> None:
    compare_built(model_path, "branches", tree=TreeConfig(mode="flat"))


def test_auto_runs_groups_without_sharing_flat(model_path: Path) -> None:
    got = compare_built(model_path, "no_common_root", tree=TreeConfig(mode="auto"))
    metrics = got["metrics"]
    assert metrics["tree/unique_tokens"].aggregate() == metrics["tree/flat_tokens"].aggregate()


@pytest.mark.parametrize("scope, unique", (("uid", 12 + 12 + 4 * 4), ("rank", 12 + 4 * 4)))
def test_scope_decides_who_may_share(model_path: Path, scope: str, unique: int) -> None:
    got = compare_built(model_path, "two_groups", tree=TreeConfig(mode="tree", scope=scope))
    assert got["metrics"]["tree/unique_tokens"].aggregate() == unique
    assert got["metrics"]["tree/flat_tokens"].aggregate() == 4 * 16


def test_inference_keeps_the_order_of_the_rows(model_path: Path) -> None:
    rows = [*SHAPES["two_groups"][::-1], *SHAPES["strict_prefix"]]
    wanted = wanted_positions(ppo_batch(rows))
    flags = {"calculate_entropy": True, "calculate_sum_pi_squared": True}
    outputs = []
    for tree in (None, TreeConfig(mode="tree", max_tokens=17), TreeConfig(mode="auto", max_tokens=40)):
        engine = build_engine(model_path, tree=tree)
        with engine.eval_mode(disable_auto_offload=True):
            outputs.append(engine.infer_batch(ppo_batch(rows, **flags))["model_output"])
    for output in outputs[1:]:
        for key in ("log_probs", "entropy", "sum_pi_squared"):
            torch.testing.assert_close(
                output[key].values()[wanted], outputs[0][key].values()[wanted], rtol=2e-5, atol=2e-5
            )
            assert torch.equal(output[key].offsets(), outputs[0][key].offsets())


def test_reference_policy_on_a_cpu(model_path: Path) -> None:
    engine = build_engine(model_path, tree=TreeConfig(mode="tree"), engine={"forward_only": True})
    stock = build_engine(model_path, tree=None)
    rows = SHAPES["branches"]
    wanted = wanted_positions(ppo_batch(rows))
    with engine.eval_mode(disable_auto_offload=True), stock.eval_mode(disable_auto_offload=True):
        got, expected = (e.infer_batch(ppo_batch(rows))["model_output"]["log_probs"] for e in (engine, stock))
    torch.testing.assert_close(got.values()[wanted], expected.values()[wanted], rtol=2e-5, atol=2e-5)


def test_checkpoint_is_plain_transformers_and_resumes(model_path: Path, tmp_path: Path) -> None:
    engine = build_engine(model_path, tree=TreeConfig(mode="tree"))
    loss = actor_loss("vanilla", "token-mean")
    with engine.train_mode(disable_auto_offload=True):
        engine.train_batch(ppo_batch(SHAPES["branches"], calculate_entropy=True), loss)
    engine.step.learner.budget.restore({"tokens": 4096, "most_flat_tokens": 2048})
    engine.save_checkpoint(str(tmp_path), global_step=1)
    configs = list(tmp_path.rglob("config.json"))
    assert configs and all("tree_rl" not in config.read_text() for config in configs)
    again = build_engine(model_path, tree=TreeConfig(mode="tree"))
    again.load_checkpoint(str(tmp_path), del_local_after_load=False)
    saved, loaded = engine.get_per_tensor_param()[0], again.get_per_tensor_param()[0]
    for (name, expected), (_, got) in zip(saved, loaded, strict=True):
        assert torch.equal(got, expected), name
    budget = again.step.learner.budget
    assert (budget.tokens, budget.most_flat_tokens) == (4096, 2048)
