"""Advantages of sessions: every estimator of verl sees one row per session; estimators that know the tree are chosen by
name, equal to verl's where nothing branches, refused elsewhere."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import verl.trainer.ppo.v1  # noqa: F401  # it loads our trainers, which cannot load it
from engine_harness import nested
from local_trainer import make_trainer
from omegaconf import OmegaConf
from verl.protocol import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

import tree_rl.verl_plugin.trainer.tree_trainer as trainer_module
from tree_rl.credit import ESTIMATORS, Estimator
from tree_rl.verl_plugin.compat import KVBatchMeta
from tree_rl.verl_plugin.trainer.advantages import Estimation, session_advantages, session_scores
from tree_rl.verl_plugin.trainer.estimator_names import ON_PATHS
from tree_rl.verl_plugin.trainer.sessions import Sessions, trained_token_weights
from tree_rl.verl_plugin.trainer.tree_estimators import credit_trees, tree_advantages

# The trainers refuse remax (test_async_trainers_build.py).
VERLS = [one.value for one in core_algos.AdvantageEstimator if one != core_algos.AdvantageEstimator.REMAX]
Batch = tuple[DataProto, list[str], list[np.ndarray], np.ndarray]
"""Rows, their keys, their token ids and the lengths of their responses."""
WIDTH = 9
PROMPT = 3
COPIES = [3, 1, 2, 1, 1, 4]
"""Rows of each session of a batch in which some branch."""
TENSORS = ("response_mask", "token_level_scores", "values", "old_log_probs", "sum_pi_squared", "kl")


def make_batch(copies: Sequence[int], seed: int = 0) -> Batch:
    """Two prompts with three sessions each; session s appears as copies[s] identical rows."""
    generator = torch.Generator().manual_seed(seed)
    rows, keys, uids = [], [], []
    for session, times in enumerate(copies):
        length = int(torch.randint(3, WIDTH + 1, (), generator=generator))
        mask = (torch.rand(WIDTH, generator=generator) < 0.7).long()
        mask[0] = mask[length - 1] = 1
        mask[length:] = 0
        inside = torch.arange(WIDTH) < length
        reward = torch.zeros(WIDTH)
        reward[length - 1] = torch.randn((), generator=generator)
        row = {
            "response_mask": mask,
            "token_level_scores": reward,
            "values": torch.randn(WIDTH, generator=generator) * inside,
            "old_log_probs": -torch.rand(WIDTH, generator=generator) * inside,
            "sum_pi_squared": torch.rand(WIDTH, generator=generator) * inside,
            "kl": torch.rand(WIDTH, generator=generator) * mask,
            "correct": reward.sum(),
            "format": torch.randn((), generator=generator),
            "ids": torch.randint(1, 50, (PROMPT + length,), generator=generator),
            "length": length,
        }
        for branch in range(times):
            rows.append(row)
            uids.append(f"uid-{session // 3}")
            keys.append(f"uid-{session // 3}_{session % 3}_{branch}")
    tensors = {name: torch.stack([row[name] for row in rows]) for name in TENSORS}
    reported = {name: np.array([float(row[name]) for row in rows], dtype=object) for name in ("correct", "format")}
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(uids, dtype=object), **reported})
    data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    return data, keys, [row["ids"].numpy() for row in rows], np.array([row["length"] for row in rows])


def settings(name: str, **extra: object) -> Estimation:
    usual = {"gamma": 0.97, "lam": 0.9, "norm_adv_by_std_in_grpo": True}
    usual |= {"gdpo_reward_keys": ["correct", "format"], "gdpo_reward_weights": [1.0, 0.5]}
    return Estimation(estimator=name, algorithm=OmegaConf.create({**usual, **extra}), num_repeat=3)


def weights_of(batch: Batch) -> Callable[[], torch.Tensor]:
    """What every trained token weighs among the rows of its session."""
    data, keys, ids, lengths = batch
    return lambda: trained_token_weights(Sessions.from_keys(keys), ids, data.batch["response_mask"], lengths)


def estimate(name: str, batch: Batch, **extra: object) -> tuple[torch.Tensor, torch.Tensor]:
    data, sessions = batch[0], Sessions.from_keys(batch[1])
    result = session_advantages(data, sessions, settings(name, **extra), weights_of(batch))
    return result.batch["advantages"], result.batch["returns"]


def advantages_of(
    estimator: Estimator,
    batch: Batch,
    *,
    extras: list[dict[str, Any]] | None = None,
    with_penalty: bool = False,
    **options: Any,
) -> torch.Tensor:
    data, keys, ids, lengths = batch
    sessions, weights = Sessions.from_keys(keys), weights_of(batch)
    scores = session_scores(data, sessions, weights() if with_penalty else None)
    masks = zip(data.batch["response_mask"], lengths.tolist(), strict=True)
    given = {"row_tokens": ids, "extras": extras or [{}] * len(keys)}
    trees = credit_trees(data, sessions, scores, nested([mask[:length] for mask, length in masks]), **given)
    computed = {"response_lengths": lengths, "token_weights": weights}
    return tree_advantages(data, trees, estimator, options, **computed).batch["advantages"]


@pytest.mark.parametrize("name", VERLS)
def test_one_row_per_session_is_verl_bit_for_bit(name: str) -> None:
    ours, our_returns = estimate(name, make_batch([1] * 6))
    data, keys, *_ = make_batch([1] * 6)
    if name == "gdpo":
        data.batch["prompts"] = torch.zeros(6, 0, dtype=torch.int64)
        data.batch["attention_mask"] = torch.ones(6, WIDTH, dtype=torch.int64)
    estimation = settings(name)
    theirs = compute_advantage_for_multi_trajectories(
        data, keys, name, gamma=0.97, lam=0.9, num_repeat=3, norm_adv_by_std_in_grpo=True, config=estimation.algorithm
    )
    assert torch.equal(ours, theirs.batch["advantages"])
    assert torch.equal(our_returns, theirs.batch["returns"])


@pytest.mark.parametrize(("name", "kl_in_reward"), [(name, at % 2 == 0) for at, name in enumerate(VERLS)])
def test_identical_branches_change_no_advantage(name: str, kl_in_reward: bool) -> None:
    single, branched = make_batch([1] * 6), make_batch(COPIES)
    for data, *_ in (single, branched):
        if kl_in_reward:
            data.batch["token_level_rewards"] = data.batch["token_level_scores"] - 0.3 * data.batch["kl"]
    expected = estimate(name, single, use_kl_in_reward=kl_in_reward)
    received = estimate(name, branched, use_kl_in_reward=kl_in_reward)
    row_of_single = np.repeat(np.arange(6), COPIES)
    mask = branched[0].batch["response_mask"].bool()
    for want, got in zip(expected, received, strict=True):
        torch.testing.assert_close(got[mask], want[row_of_single][mask], rtol=2e-5, atol=2e-6)


def test_a_token_shared_by_branches_weighs_one() -> None:
    ids = [np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5, 6]), np.array([1, 2, 9])]
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 0, 0]])
    sessions = Sessions.from_keys(["u_0_0", "u_0_1", "u_1_0"])
    weights = trained_token_weights(sessions, ids, mask, np.array([2, 3, 1]))
    # Response tokens: row 0 is 3, 4; row 1 is 3, 5, 6; token 3 is trained in both rows of session 0.
    expected = torch.tensor([[0.5, 1.0, 0.0], [0.5, 0.0, 1.0], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_another_libs_estimator_sees_one_row_per_session() -> None:
    seen: list[int] = []

    @core_algos.register_adv_est("tree_rl_test_counts_rows")
    def count_rows(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: object) -> Any:
        seen.append(len(token_level_rewards))
        return token_level_rewards * response_mask, token_level_rewards

    try:
        estimate("tree_rl_test_counts_rows", make_batch([3, 1, 2, 1, 1, 1]))
    finally:
        del core_algos.ADV_ESTIMATOR_REGISTRY["tree_rl_test_counts_rows"]
    assert seen == [6, 6, 6]


def test_a_malformed_row_key_is_named() -> None:
    with pytest.raises(ValueError, match=r"\{uid\}_\{session\}_\{index\}, received 'nonsense'"):
        Sessions.from_keys(["u_0_0", "nonsense"])


def of_one_prompt(mask: torch.Tensor, scores: torch.Tensor) -> DataProto:
    """Three rows."""
    tensors = {"response_mask": mask, "token_level_scores": scores, "token_level_rewards": scores.clone()}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(["u"] * 3, dtype=object)})


@pytest.mark.parametrize(
    ("name", "options", "verls", "copies", "atol"),
    [
        ("tree_loo", {}, "rloo", [1] * 6, 1e-6),
        # No two sessions share a generated token, so a tree has one leaf, and the states before all steps differ.
        *(("tree_grpo", {}, "grpo", copies, 1e-5) for copies in ([1] * 6, COPIES)),
        *(("gigpo", {"omega": 0.0, "states": "observation"}, "grpo", copies, 1e-5) for copies in ([1] * 6, COPIES)),
    ],
)
def test_comparisons_are_verls(name: str, options: dict[str, Any], verls: str, copies: list[int], atol: float) -> None:
    expected, _ = estimate(verls, make_batch(copies))
    got = advantages_of(ESTIMATORS[name], make_batch(copies), **options)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=atol)


def test_whitening_counts_each_token_of_a_session_once() -> None:
    batch = make_batch(COPIES)
    got = advantages_of(ESTIMATORS["treepo"], batch)
    mask, share = make_batch(COPIES)[0].batch["response_mask"].bool(), weights_of(batch)()
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
        return advantages_of(ESTIMATORS["gigpo"], (data, keys, ids, lengths), extras=extras, **more)

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
        got = advantages_of(ESTIMATORS["rtmc"], batch, states="observation", prior=0.0)
        found.append(got[np.argsort(order)].tolist())
    assert found[0] == found[1] == [[0.5, 0.5], [0.5, 0.5], [-0.5, -0.5]]


def test_a_function_of_ones_own_must_return_a_number_for_each_token() -> None:
    def half(tree: Any) -> np.ndarray:
        return np.ones(1)

    for function, name in ((half, "half"), (partial(half), "functools.partial")):
        with pytest.raises(ValueError, match=rf"prompt uid-0: expected a finite advantage for each of .* from {name}"):
            advantages_of(Estimator(function), make_batch([1] * 6))


def test_a_penalty_in_the_reward_counts_once_per_unique_token() -> None:
    results = []
    for times in ([1] * 6, COPIES):
        batch = make_batch(times)
        batch[0].batch["token_level_rewards"] = batch[0].batch["token_level_scores"] - 0.3 * batch[0].batch["kl"]
        results.append(advantages_of(ESTIMATORS["tree_loo"], batch, with_penalty=True))
    mask, row_of_single = make_batch(COPIES)[0].batch["response_mask"].bool(), np.repeat(np.arange(6), COPIES)
    torch.testing.assert_close(results[1][mask], results[0][row_of_single][mask], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(results[0], advantages_of(ESTIMATORS["tree_loo"], make_batch([1] * 6)))


@pytest.mark.parametrize("name", [*ESTIMATORS, *ON_PATHS])
def test_verls_own_trainers_refuse_them_with_the_key(name: str) -> None:
    estimator = core_algos.get_adv_estimator_fn(name)
    with pytest.raises(NotImplementedError, match=rf"algorithm\.adv_estimator={name}.*trainer_mode=tree_sync"):
        estimator(token_level_rewards=torch.zeros(1, 1), response_mask=torch.ones(1, 1), config=None)


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
