"""Estimators that know the tree: chosen by name, equal to verl's where nothing branches, refused elsewhere."""

import numpy as np
import pytest
import torch
import verl.trainer.ppo.v1  # noqa: F401  # it loads our trainers, which cannot load it
from omegaconf import OmegaConf
from session_batches import estimate, make_batch
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

import tree_rl.verl_plugin.trainer.tree_trainer as trainer_module
from tree_rl.verl_plugin.compat import KVBatchMeta
from tree_rl.verl_plugin.trainer.estimator_names import ON_PATHS, TREE_LOO, resolve_estimator
from tree_rl.verl_plugin.trainer.sessions import Sessions, trained_token_weights
from tree_rl.verl_plugin.trainer.tree_estimators import longest_paths, tree_loo


def tree_advantages(copies: list[int]) -> torch.Tensor:
    data, keys, ids, lengths = make_batch(copies)
    sessions = Sessions.from_keys(keys)
    return tree_loo(data, sessions, row_tokens=ids, response_lengths=lengths).batch["advantages"]


def test_where_nothing_branches_it_is_verls_rloo() -> None:
    expected, _ = estimate("rloo", make_batch([1] * 6))
    torch.testing.assert_close(tree_advantages([1] * 6), expected, rtol=1e-5, atol=1e-6)


def test_identical_branches_of_a_session_change_nothing() -> None:
    copies = [3, 1, 2, 1, 1, 4]
    expected, _ = estimate("rloo", make_batch(copies))
    torch.testing.assert_close(tree_advantages(copies), expected, rtol=1e-5, atol=1e-6)


def hand_worked(tokens: list[list[int]], masks: list[list[int]], rewards: list[float], keys: list[str]) -> DataProto:
    """Rows whose prompt is their first token."""
    width = max(map(len, masks))
    mask_BT = torch.tensor([mask + [0] * (width - len(mask)) for mask in masks])
    scores_BT = torch.zeros(len(masks), width)
    for row, (mask, reward) in enumerate(zip(masks, rewards, strict=True)):
        scores_BT[row, len(mask) - 1] = reward
    uids = np.array([key.rsplit("_", 2)[0] for key in keys], dtype=object)
    data = DataProto.from_dict(
        tensors={"response_mask": mask_BT, "token_level_scores": scores_BT, "token_level_rewards": scores_BT.clone()},
        non_tensors={"uid": uids},
    )
    return tree_loo(
        data,
        Sessions.from_keys(keys),
        row_tokens=[np.array(row) for row in tokens],
        response_lengths=np.array([len(mask) for mask in masks]),
    )


def test_each_branching_segment_has_its_own_advantage() -> None:
    tokens = [[1, 2, 2, 3], [1, 2, 2, 4, 4], [1, 5], [1, 2]]
    data = hand_worked(
        tokens, [[1, 0, 1], [1, 0, 1, 1], [1], [1]], [1.0, 0.0, 0.0, 3.0], ["u_0_0", "u_1_0", "u_2_0", "w_0_0"]
    )
    # Group u. The first 2 is shared by sessions 0 and 1: 0.5 - 0. Behind the fork: +1 and -1. Session 2: 0 - 0.5.
    # The second 2 is an observation. Group w has one session: its outcome, as in verl's rloo.
    expected = torch.tensor([[0.5, 0, 1, 0], [0.5, 0, -1, -1], [-0.5, 0, 0, 0], [3, 0, 0, 0]])
    torch.testing.assert_close(data.batch["advantages"], expected)
    assert torch.equal(data.batch["returns"], data.batch["advantages"])


def test_a_penalty_in_the_reward_counts_once_per_unique_token() -> None:
    copies = [3, 1, 2, 1, 1, 4]
    results = []
    for times in ([1] * 6, copies):
        data, keys, ids, lengths = make_batch(times)
        data.batch["token_level_rewards"] = data.batch["token_level_scores"] - 0.3 * data.batch["kl"]
        sessions = Sessions.from_keys(keys)
        weights = trained_token_weights(sessions, ids, data.batch["response_mask"], lengths)
        tree_loo(data, sessions, row_tokens=ids, response_lengths=lengths, token_weights=lambda given=weights: given)
        results.append(data.batch["advantages"])
    mask = make_batch(copies)[0].batch["response_mask"].bool()
    torch.testing.assert_close(
        results[1][mask], results[0][np.repeat(np.arange(6), copies)][mask], rtol=1e-5, atol=1e-6
    )
    assert not torch.allclose(results[0], tree_advantages([1] * 6))


def test_the_longest_path_of_each_session_is_kept_and_ties_go_to_the_last() -> None:
    sessions = Sessions.from_keys(["u_0_0", "u_0_1", "u_1_0", "u_1_1", "w_0_0"])
    assert longest_paths(sessions, [5, 4, 7, 7, 1]) == [0, 3, 4]


def test_names_resolve_to_verls_estimators() -> None:
    assert resolve_estimator("full_tree") == ("grpo", "all")
    assert resolve_estimator("longest_path") == ("grpo", "longest")
    assert resolve_estimator("gae") == ("gae", "all")


@pytest.mark.parametrize("name", [TREE_LOO, *ON_PATHS])
def test_verls_own_trainers_refuse_them_with_the_key(name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"algorithm\.adv_estimator={name}.*trainer_mode=tree_sync"):
        get_adv_estimator_fn(name)(token_level_rewards=torch.zeros(1, 1), response_mask=torch.ones(1, 1), config=None)


@pytest.mark.parametrize("name", ["full_tree", "longest_path"])
def test_rows_that_do_not_train_leave_the_batch_and_the_store(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[str] = []

    class Store:
        @staticmethod
        def kv_clear(keys: list[str], partition_id: str) -> None:
            assert partition_id == "train"
            cleared.extend(keys)

    class Trainer(trainer_module.TreeTrainerMixin):
        def __init__(self) -> None:
            self.config = OmegaConf.create({"algorithm": {"adv_estimator": name}})

        on_sample_end = on_step_end = lambda self: None

    monkeypatch.setattr(trainer_module, "tq", Store)
    keys = ["u_0_0", "u_0_1", "u_0_2", "u_1_0", "w_0_0", "w_0_1"]
    lengths = [5, 9, 3, 4, 2, 8]
    batch = KVBatchMeta(keys=keys, tags=[{"seq_len": n} for n in lengths], partition_id="train")
    metrics: dict[str, float] = {}
    kept = Trainer()._keep_trained_paths(batch, metrics)
    if name == "longest_path":
        assert kept.keys == ["u_0_1", "u_1_0", "w_0_1"] and sorted(cleared) == ["u_0_0", "u_0_2", "w_0_0"]
        assert metrics == {"tree/untrained_rows": 3, "tree/untrained_row_tokens": 10}
    else:
        assert kept.keys == keys and not cleared and not metrics
