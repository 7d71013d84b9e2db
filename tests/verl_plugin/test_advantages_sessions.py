"""One outcome per session, for every estimator that verl registers."""

import numpy as np
import pytest
import torch
from session_batches import COPIES, WIDTH, estimate, make_batch, settings
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, AdvantageEstimator, register_adv_est
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from tree_rl.verl_plugin.trainer.sessions import Sessions, trained_token_weights

# The trainers refuse remax (test_async_trainers_build.py).
ESTIMATORS = [member.value for member in AdvantageEstimator if member != AdvantageEstimator.REMAX]


@pytest.mark.parametrize("name", ESTIMATORS)
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


@pytest.mark.parametrize(("name", "kl_in_reward"), [(name, at % 2 == 0) for at, name in enumerate(ESTIMATORS)])
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

    @register_adv_est("tree_rl_test_counts_rows")
    def count_rows(
        token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(len(token_level_rewards))
        return token_level_rewards * response_mask, token_level_rewards

    try:
        estimate("tree_rl_test_counts_rows", make_batch([3, 1, 2, 1, 1, 1]))
    finally:
        del ADV_ESTIMATOR_REGISTRY["tree_rl_test_counts_rows"]
    assert seen == [6, 6, 6]


def test_a_malformed_row_key_is_named() -> None:
    with pytest.raises(ValueError, match=r"\{uid\}_\{session\}_\{index\}, received 'nonsense'"):
        Sessions.from_keys(["u_0_0", "nonsense"])
