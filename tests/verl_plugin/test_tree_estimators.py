"""Estimators that know the tree: chosen by name, equal to verl's where nothing branches, refused elsewhere."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import verl.trainer.ppo.v1  # noqa: F401  # it loads our trainers, which cannot load it
from engine_harness import nested
from local_trainer import make_trainer
from session_batches import COPIES, estimate, make_batch
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

import tree_rl.verl_plugin.trainer.tree_trainer as trainer_module
from tree_rl.credit import ESTIMATORS, Estimator
from tree_rl.verl_plugin.compat import KVBatchMeta
from tree_rl.verl_plugin.trainer.advantages import session_scores
from tree_rl.verl_plugin.trainer.estimator_names import ON_PATHS
from tree_rl.verl_plugin.trainer.sessions import Sessions, trained_token_weights
from tree_rl.verl_plugin.trainer.tree_estimators import credit_trees, tree_advantages


def nested_mask(data: DataProto, lengths: np.ndarray) -> torch.Tensor:
    pairs = zip(data.batch["response_mask"], lengths.tolist(), strict=True)
    return nested([mask[:length] for mask, length in pairs])


def advantages_of(
    estimator: Estimator,
    data: DataProto,
    keys: list[str],
    ids: list[np.ndarray],
    lengths: np.ndarray,
    *,
    extras: list[dict[str, Any]] | None = None,
    with_penalty: bool = False,
    **options: Any,
) -> torch.Tensor:
    sessions = Sessions.from_keys(keys)

    def weights() -> torch.Tensor:
        return trained_token_weights(sessions, ids, data.batch["response_mask"], lengths)

    scores = session_scores(data, sessions, weights() if with_penalty else None)
    given = {"row_tokens": ids, "extras": extras or [{}] * len(keys)}
    trees = credit_trees(data, sessions, scores, nested_mask(data, lengths), **given)
    computed = {"response_lengths": lengths, "token_weights": weights}
    return tree_advantages(data, trees, estimator, options, **computed).batch["advantages"]


def of_one_prompt(mask: torch.Tensor, scores: torch.Tensor) -> DataProto:
    """Three rows."""
    tensors = {"response_mask": mask, "token_level_scores": scores, "token_level_rewards": scores.clone()}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(["u"] * 3, dtype=object)})


@pytest.mark.parametrize(
    ("name", "options", "verls", "copies", "tolerance"),
    [
        ("tree_loo", {}, "rloo", [1] * 6, 1e-6),
        # No two sessions share a generated token, so a tree has one leaf, and the states before all steps differ.
        *(("tree_grpo", {}, "grpo", copies, 1e-5) for copies in ([1] * 6, COPIES)),
        *(("gigpo", {"omega": 0.0, "states": "observation"}, "grpo", copies, 1e-5) for copies in ([1] * 6, COPIES)),
    ],
)
def test_comparison_within_the_prompt_is_verls(
    name: str, options: dict[str, Any], verls: str, copies: list[int], tolerance: float
) -> None:
    expected, _ = estimate(verls, make_batch(copies))
    got = advantages_of(ESTIMATORS[name], *make_batch(copies), **options)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=tolerance)


def test_whitening_counts_each_token_of_a_session_once() -> None:
    batch = make_batch(COPIES)
    got = advantages_of(ESTIMATORS["treepo"], *batch)
    mask = make_batch(COPIES)[0].batch["response_mask"].bool()
    _, keys, ids, lengths = batch
    share = trained_token_weights(Sessions.from_keys(keys), ids, mask.long(), lengths)
    total = share.sum()
    assert float((got * share).sum() / total) == pytest.approx(0, abs=1e-5)
    assert float((got**2 * share).sum() / (total - 1)) == pytest.approx(1, abs=1e-4)
    assert not got[~mask].any()


def test_calls_and_reports_of_sessions_reach_the_estimator() -> None:
    keys, ids = ["u_0_0", "u_1_0", "u_2_0"], [np.array([1, 2, 7, 3]), np.array([1, 4, 8, 3]), np.array([1, 5, 7, 6])]
    mask = torch.tensor([[1, 0, 1]] * 3)
    scores = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])

    lengths, options = np.array([3, 3, 3]), {"omega": 0.5, "gamma": 0.5}

    def gigpo(extras: list[dict[str, Any]] | None = None, **more: Any) -> torch.Tensor:
        data = of_one_prompt(mask, scores)
        return advantages_of(ESTIMATORS["gigpo"], data, keys, ids, lengths, extras=extras, **more)

    # Call 1 was a side call that no row contains.
    keyed = [["s", "-", "a"], ["s", "-", "b"], ["s", "-", "a"]]
    extras = [{"response_calls": [0, -1, 2], "credit": {"states": one}} for one in keyed]
    # The numbers of tests/credit/test_estimators_on_worked_trees.py.
    expected = torch.tensor([[1.73205, 0, 1.50825], [-0.86603, 0, -0.57735], [-0.86603, 0, -0.9309]])
    for got in (gigpo(extras, **options), gigpo(states="observation", **options)):
        torch.testing.assert_close(got, expected, rtol=0, atol=3e-5)
    for wrong, message in (
        ([{}] * 3, r"prompt u: session 0 reports no state"),
        ([{"credit": {"state": "s"}}] * 3, "a session reports 'state'; known are step_rewards, states"),
        ([{}, {"credit": {"weight": -1}}, {}], "prompt u, session 1, row 1: weight -1: expected at least 0"),
        ([{}, {"credit": ["s"]}, {}], "prompt u, session 1, row 1: credit .* expected entries step_rewards"),
        ([{}, {"response_calls": [0]}, {}], "prompt u, row 1: response_calls: expected a whole number for each of 3"),
    ):
        with pytest.raises(ValueError, match=message):
            gigpo(wrong)


def test_a_step_without_recorded_calls_is_a_run_that_rows_of_a_session_share() -> None:
    # Session 0 forks behind its first call; both rows hold it.
    keys = ["u_0_0", "u_0_1", "u_1_0"]
    ids = [np.array([1, 2, 2, 9, 3]), np.array([1, 2, 2, 9, 4, 4]), np.array([1, 5])]
    masks = nested([torch.tensor([1, 1, 0, 1]), torch.tensor([1, 1, 0, 1, 1]), torch.tensor([1])])
    data = DataProto.from_dict(tensors={"row": torch.zeros(3)}, non_tensors={"uid": np.array(["u"] * 3, dtype=object)})
    sessions = Sessions.from_keys(keys)
    ((_, tree),) = credit_trees(data, sessions, torch.zeros(2), masks, row_tokens=ids, extras=[{}] * 3)
    steps = [row.tolist() for row in tree.forest.row_index.with_values(tree.steps.step_F)]
    assert steps == [[-1, 0, 0, -1, 1], [-1, 0, 0, -1, 2, 2], [-1, 3]]
    assert tree.steps.leaf_T.tolist() == [0, 0, 0, 1]


def test_the_order_of_a_batch_decides_nothing() -> None:
    # Without recorded calls the first session's rows are one step with two ends; its action is what branch 0 generated.
    keys, ids = ["u_0_0", "u_0_1", "u_1_0"], [np.array([1, 2, 3]), np.array([1, 2, 4]), np.array([1, 2, 4])]
    scores = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    found = []
    for order in ([0, 1, 2], [2, 1, 0]):
        data = of_one_prompt(torch.ones(3, 2), scores[order])
        batch = data, [keys[row] for row in order], [ids[row] for row in order], np.array([2, 2, 2])
        got = advantages_of(ESTIMATORS["rtmc"], *batch, states="observation", prior=0.0)
        found.append(got[np.argsort(order)].tolist())
    assert found[0] == found[1] == [[0.5, 0.5], [0.5, 0.5], [-0.5, -0.5]]


def test_a_function_of_ones_own_must_return_a_number_for_each_token() -> None:
    def half(tree: Any) -> np.ndarray:
        return np.ones(1)

    for function, name in ((half, "half"), (partial(half), "functools.partial")):
        with pytest.raises(ValueError, match=rf"prompt uid-0: expected a finite advantage for each of .* from {name}"):
            advantages_of(Estimator(function), *make_batch([1] * 6))


def test_a_penalty_in_the_reward_counts_once_per_unique_token() -> None:
    results = []
    for times in ([1] * 6, COPIES):
        data, keys, ids, lengths = make_batch(times)
        data.batch["token_level_rewards"] = data.batch["token_level_scores"] - 0.3 * data.batch["kl"]
        results.append(advantages_of(ESTIMATORS["tree_loo"], data, keys, ids, lengths, with_penalty=True))
    mask, row_of_single = make_batch(COPIES)[0].batch["response_mask"].bool(), np.repeat(np.arange(6), COPIES)
    torch.testing.assert_close(results[1][mask], results[0][row_of_single][mask], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(results[0], advantages_of(ESTIMATORS["tree_loo"], *make_batch([1] * 6)))


@pytest.mark.parametrize("name", [*ESTIMATORS, *ON_PATHS])
def test_verls_own_trainers_refuse_them_with_the_key(name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"algorithm\.adv_estimator={name}.*trainer_mode=tree_sync"):
        get_adv_estimator_fn(name)(token_level_rewards=torch.zeros(1, 1), response_mask=torch.ones(1, 1), config=None)


@pytest.mark.parametrize("name", ["full_tree", "longest_path"])
def test_rows_that_do_not_train_leave_the_batch_and_the_store(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest path of each session trains; ties go to the last."""
    cleared: list[str] = []
    store = SimpleNamespace(kv_clear=lambda keys, partition_id: cleared.extend(keys))
    monkeypatch.setattr(trainer_module, "tq", store)
    keys = ["u_0_0", "u_0_1", "u_0_2", "u_1_0", "w_0_0", "w_0_1"]
    tags = [{"seq_len": length} for length in (5, 9, 3, 4, 8, 8)]
    metrics: dict[str, float] = {}
    kept = make_trainer(name)._keep_trained_paths(KVBatchMeta(keys, tags, "train"), metrics)
    if name == "longest_path":
        assert kept.keys == ["u_0_1", "u_1_0", "w_0_1"] and sorted(cleared) == ["u_0_0", "u_0_2", "w_0_0"]
        assert metrics == {"tree/untrained_rows": 3, "tree/untrained_row_tokens": 16}
    else:
        assert kept.keys == keys and not cleared and not metrics
