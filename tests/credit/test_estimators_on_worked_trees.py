"""Every estimator on trees whose advantages are worked by hand."""

import pytest
from worked_trees import CONTEXT, credit_of, tree_of, worked

from tree_rl.credit import CreditTree
from tree_rl.credit.by_node import branpo, spo, tree_grpo, tree_loo, treepo, treerl
from tree_rl.credit.by_step import gigpo, rtmc, vine

THIRD, HALF_ROOT = 0.33333, 0.70711
FORK = [[1, 2, 3], [1, 2, 4], [1, 5], [1, 6]]
"""Prompt 1; two leaves fork after token 2, two are alone. Outcomes 1, 0, 0, 0: V(root) = 1/4, V(2) = 1/2."""
OUTCOMES = [1.0, 0.0, 0.0, 0.0]


def behind_the_prompt(credit: list[list[float]]) -> list[list[float]]:
    return [row[1:] for row in credit]


SUBTREES = {
    # RLOO: 1 - 0.25, 0 - 0.75, 0.5 - 0.5.
    "independent sessions": (
        [[1, 2, 3], [1, 4], [1, 5, 6]], [0, 1, 2], [1.0, 0.0, 0.5], [[0, 0.75, 0.75], [0, -0.75], [0, 0, 0]],
    ),
    # 1 -> 2 -> {6, 7, 8} (0, 1, 1), 1 -> 3 (1), 1 -> 4 (0).
    # Segment 2: 2/3 - 1/2 = 1/6. 3: 1 - (0 + 1 + 1 + 0) / 4 = 1/2. 4: 0 - 3/4. Leaves: 0 - 1, 1 - 1/2, 1 - 1/2.
    "three subtrees of different size": (
        [[1, 2, 6], [1, 2, 7], [1, 2, 8], [1, 3], [1, 4]], [0, 1, 2, 3, 4], [0.0, 1.0, 1.0, 1.0, 0.0],
        [[0, 1 / 6, -1], [0, 1 / 6, 0.5], [0, 1 / 6, 0.5], [0, 0.5], [0, -0.75]],
    ),
    # Token 2 is shared by both sessions; session 0 goes on in two rows, session 1 in one; session 2 went elsewhere.
    "a fork inside a session below a token of two": (
        [[1, 2, 3, 8], [1, 2, 3, 9], [1, 2, 4], [1, 5]], [0, 0, 1, 2], [1.0, 0.0, 1.0],
        [[0, -0.5, 1, 1], [0, -0.5, 1, 1], [0, -0.5, -1], [0, 0.5]],
    ),
    "a sub-agent with a prompt of its own": (
        [[1, 2], [900, 3], [1, 4]], [0, 0, 1], [1.0, 0.0], [[0, 1], [1, 1], [0, -1]],
    ),
    "a session that ends where another goes on": ([[1, 2], [1, 2, 3]], [0, 1], [1.0, 0.0], [[0, 0], [0, 0, -1]]),
}  # fmt: skip
"""Rows, their sessions, the sessions' outcomes, the credit of each token."""


@pytest.mark.parametrize("case", SUBTREES)
def test_tree_loo_compares_sibling_subtrees(case: str) -> None:
    rows, sessions, outcomes, expected = SUBTREES[case]
    assert credit_of(tree_loo, tree_of(rows, outcomes, leaf_of_row=sessions)) == worked(expected, error=1e-9)


def test_spo_is_the_difference_to_the_parent() -> None:
    credit = credit_of(spo, tree_of(FORK, OUTCOMES))
    assert credit == worked([[0, 0.25, 0.5], [0, 0.25, -0.5], [0, -0.25], [0, -0.25]])
    # The deviation of 1, 0, 0, 0 is 0.433013; at token 2 that of 1, 0 is 0.5. 0.25 / 0.433013 = 0.57735.
    by_std = credit_of(spo, tree_of(FORK, OUTCOMES), by_std=True)
    assert by_std == worked([[0, 0.57735, 1], [0, 0.57735, -1], [0, -0.57735], [0, -0.57735]])


def test_treerl_adds_the_differences_to_parent_and_root_over_the_root_of_the_leaves() -> None:
    # Leave one out: 1 - 0 = 1 for the first leaf, 0 - 1/3 for the others. V(2) = 1/3, V(root) = 0.
    # Token 2: (1/3 + 1/3) / sqrt(2). Token 3: (1 - 1/3) + 1. Token 4: (-1/3 - 1/3) - 1/3. Tokens 5, 6: -1/3 - 1/3.
    credit = credit_of(treerl, tree_of(FORK, OUTCOMES))
    assert credit == worked([[0, 0.4714, 1.66667], [0, 0.4714, -1], [0, -0.66667], [0, -0.66667]])
    alone = credit_of(treerl, tree_of(FORK, OUTCOMES), with_root=False)
    assert alone == worked([[0, 0.2357, 0.66667], [0, 0.2357, -0.66667], [0, -THIRD], [0, -THIRD]])


def test_treepo_weighs_the_groups_above_a_leaf_by_their_size() -> None:
    # First leaf: (4 (1 - 1/4) + 2 (1 - 1/2)) / 6 = 2/3. Second: (4 (-1/4) + 2 (-1/2)) / 6 = -1/3. Others: -1/4.
    credit = behind_the_prompt(credit_of(treepo, tree_of(FORK, OUTCOMES)))
    assert credit == worked([[0.66667, 0.66667], [-THIRD, -THIRD], [-0.25], [-0.25]])


@pytest.mark.parametrize(
    "variant, expected",
    [
        # Prompt: (1 - 1/4) / 0.5 = 1.5 and -0.5. Tree of the first two: +-0.5 / 0.707107; a tree of one: 0.
        ("tree", [[2.20711] * 2, [-1.20711] * 2, [-0.5], [-0.5]]),
        ("tree_inner", [[HALF_ROOT] * 2, [-HALF_ROOT] * 2, [0], [0]]),
        # 1.5 and -0.5 within the tree: mean 0.5, deviation 1.414214.
        ("tree_2norm", [[HALF_ROOT] * 2, [-HALF_ROOT] * 2, [0], [0]]),
        # Token rewards 0 1, 0 0, 0, 0. Prompt: mean 1/6, deviation 0.408248: 2.041241 and -0.408248. Tree: mean 1/4,
        # deviation 0.5: 1.5 and -0.5.
        ("tree_per_token", [[-0.90825, 3.54124], [-0.90825] * 2, [-0.40825], [-0.40825]]),
    ],
)
def test_tree_grpo_compares_within_the_prompt_and_within_the_tree(variant: str, expected: list[list[float]]) -> None:
    assert behind_the_prompt(credit_of(tree_grpo, tree_of(FORK, OUTCOMES), variant=variant)) == worked(expected)


def test_tree_grpos_second_normalisation_is_of_the_first() -> None:
    # Prompt: outcomes 1, 0, 0 in two trees of two leaves, one given by key. 2norm differs where a tree's spread does.
    tree = tree_of([[1, 2], [1, 3], [1, 4]], [1.0, 0.0, 0.0], leaves=[{"tree": "a"}, {"tree": "a"}, {"tree": "b"}])
    # Within the prompt: 1.154701, -0.577350, -0.577350. Tree a: mean 0.288675, deviation 1.224745.
    twice = behind_the_prompt(credit_of(tree_grpo, tree, variant="tree_2norm"))
    assert twice == worked([[HALF_ROOT], [-HALF_ROOT], [0]])
    assert behind_the_prompt(credit_of(tree_grpo, tree)) == worked([[1.86181], [-1.28446], [-0.57735]])


def test_branpo_compares_trunks_by_their_mean_and_suffixes_with_each_other() -> None:
    # Trees: 1/2, 0, 0. Mean 1/6, deviation 0.288675: 1.154701, -0.577350. Suffixes 1, 0: +-0.707107.
    credit = behind_the_prompt(credit_of(branpo, tree_of(FORK, OUTCOMES)))
    assert credit == worked([[1.1547, HALF_ROOT], [1.1547, -HALF_ROOT], [-0.57735], [-0.57735]])


def two_trunks(outcomes: list[float]) -> CreditTree:
    rows = [[1, 2, 3], [1, 2, 9, 3], [1, 5, 3], [1, 5, 4]]
    steps = [[CONTEXT, 0, 1], [CONTEXT, 0, 1, 2], [CONTEXT, 0, 1], [CONTEXT, 0, 1]]
    return tree_of(rows, outcomes, steps=steps)


def test_branpo_takes_a_positive_first_step_away_from_the_longer_of_two_equals_or_the_worse_of_two_good() -> None:
    # Suffixes 1, 1, 0, 1: mean 3/4, deviation 0.5. The second leaf has three steps, its sibling two.
    credit = behind_the_prompt(credit_of(branpo, two_trunks([1.0, 1.0, 0.0, 1.0])))
    assert [row[1:] for row in credit] == worked([[0.5], [0, 0.5], [-1.5], [0.5]])
    # Trunks 1 and 1/2: +-0.25 / 0.353553.
    assert [row[:1] for row in credit] == worked([[HALF_ROOT], [HALF_ROOT], [-HALF_ROOT], [-HALF_ROOT]])
    assert credit_of(branpo, two_trunks([1.0, 1.0, 0.0, 1.0]), solved_from=0.75)[1][2] == pytest.approx(0.5, abs=3e-5)
    # Suffixes 0.8, 1, 0, 0: mean 0.45, deviation 0.525991. The first is above the mean and below its sibling.
    credit = credit_of(branpo, two_trunks([0.8, 1.0, 0.0, 0.0]))
    assert [row[-1:] for row in credit] == worked([[0], [1.04564], [-0.85553], [-0.85553]])


def test_branpos_trunks_are_those_of_a_tree() -> None:
    # The first leaves of two trees begin with the same token by chance, which none of their own tree shares.
    trees = [{"tree": tree} for tree in "aabb"]
    tree = tree_of([[1, 2, 3], [1, 4], [1, 2, 5], [1, 6]], [1.0, 0.0, 0.0, 0.0], leaves=trees)
    # Suffixes 1, 0, 0, 0: mean 1/4, deviation 0.5.
    assert behind_the_prompt(credit_of(branpo, tree)) == worked([[1.5, 1.5], [-0.5], [-0.5, -0.5], [-0.5]])


TWO_STEPS = [[CONTEXT, 0, CONTEXT, 1]] * 3


def test_gigpo_adds_the_comparison_of_steps_from_one_state() -> None:
    states = [{"states": ["s", "a"]}, {"states": ["s", "b"]}, {"states": ["s", "a"]}]
    tree = tree_of([[1, 2, 7, 3], [1, 4, 8, 3], [1, 5, 7, 6]], [1.0, 0.0, 0.0], steps=TWO_STEPS, leaves=states)
    # Episode: 1.154701, -0.577350, -0.577350. Returns with gamma 1/2: 1/2 1, 0 0, 0 0.
    # State s: 1.154701, -0.577350, -0.577350. State a: +-0.707107. State b is alone: 0. Half of each counts.
    credit = credit_of(gigpo, tree, omega=0.5, gamma=0.5)
    first, second, third = credit
    assert [first[1], first[3]] == pytest.approx([1.73205, 1.50825], abs=1e-5)
    assert [second[1], second[3]] == pytest.approx([-0.86603, -0.57735], abs=1e-5)
    assert [third[1], third[3]] == pytest.approx([-0.86603, -0.9309], abs=1e-5)
    # Means alone: episode 2/3, state s: 1/2 - 1/6, state a: 1/2.
    by_mean = credit_of(gigpo, tree, omega=0.5, gamma=0.5, by_std=False)[0]
    assert [by_mean[1], by_mean[3]] == pytest.approx([0.83333, 0.91667], abs=1e-5)


def test_calls_that_fork_behind_equal_tokens_are_whole_steps_from_one_state() -> None:
    # The first session asks twice at its start: both answers begin with 7, as the other session's does.
    rows, leaf_of_row = [[1, 7, 2], [1, 7, 3, 9, 4], [1, 7, 5, 9, 4]], [0, 0, 1]
    steps = [[CONTEXT, 1, 0], [CONTEXT, 1, 1, CONTEXT, 2], [CONTEXT, 0, 0, CONTEXT, 1]]
    rewards = [{"step_rewards": [0.25, 1.0, 0.5]}, {}]
    tree = tree_of(rows, [1.0, 0.0], leaf_of_row=leaf_of_row, steps=steps, leaves=rewards)
    assert tree.states("observation").tolist() == [0, 0, 1, 0, 1]
    assert tree.actions().tolist() == [0, 1, 2, 3, 2]
    # The other session's state is not the one after 7, but the prompt: V = (1.75 + 0) / 2, V after 7 3 9 is alone.
    assert credit_of(vine, tree)[2] == worked([[0, -0.875, -0.875, 0, -0.875]])[0]
    # The first row leaves call 1 at 7, and has no reward of it. Token rewards 0 1/4, 0 1 1/2, 0 0 0: mean 7/32,
    # deviation 0.364434; twice, as both sessions are one tree.
    credit = credit_of(tree_grpo, tree, variant="tree_per_token")[2]
    assert credit == worked([[0, -1.20049, -1.20049, 0, -1.20049]])[0]


SHARED_STEP = [[1, 2, 9, 3], [1, 2, 9, 4], [1, 5, 9, 3]]


def test_vine_follows_a_step_to_the_next_state_that_several_leaves_pass_and_counts_rewards_from_there() -> None:
    rewards = [{"step_rewards": [0.5, 1.0]}, {"step_rewards": [0.5, 0.0]}, {"step_rewards": [0.0, 0.0]}]
    # V(prompt) = (1.5 + 0.5 + 0) / 3. V(1 2 9) = (1 + 0) / 2. First step: 0.5 + 0.5 - 2/3. Third leaf: 0 - 2/3;
    # nobody else was where its second step starts.
    credit = credit_of(vine, tree_of(SHARED_STEP, [1.0, 0.0, 0.0], steps=TWO_STEPS, leaves=rewards))
    assert credit == worked([[0, THIRD, 0, 0.5], [0, THIRD, 0, -0.5], [0, -0.66667, 0, -0.66667]])


def test_rtmc_compares_actions_in_a_state() -> None:
    keys = [
        {"states": ["s", "a"], "actions": ["x", "y"]},
        {"states": ["s", "a"], "actions": ["x", "z"]},
        {"states": ["s", "b"], "actions": ["w", "y"]},
    ]
    tree = tree_of(SHARED_STEP, [1.0, 0.0, 0.0], steps=TWO_STEPS, leaves=keys)
    # Q(s, x) = 1/2 of two rollouts, Q(s, w) = 0 of one, V(s) = 1/3. Q(a, y) = 1, Q(a, z) = 0, V(a) = 1/2. With prior 2:
    # (2 / 4) (1/2 - 1/3), (1 / 3) (0 - 1/3), (1 / 3) (+-1/2); b is alone: 0.
    credit = credit_of(rtmc, tree, gamma=1.0, prior=2.0)
    assert credit == worked([[0, 0.08333, 0, 0.16667], [0, 0.08333, 0, -0.16667], [0, -0.11111, 0, 0]])
    # V'(s) = 1/3, V'(a) = (2 / 2 + 2 / 3) / 4 = 5/12, V'(b) = (0 + 2 / 3) / 3 = 2/9.
    by_state = credit_of(rtmc, tree, gamma=1.0, prior=2.0, smooth="state")
    assert by_state == worked([[0, 0.16667, 0, 0.58333], [0, 0.16667, 0, -0.41667], [0, -THIRD, 0, -0.22222]])
    # With gamma 1/2 the first step of the first leaf is worth 1/2: Q(s, x) = 1/4, V(s) = 1/6.
    assert credit_of(rtmc, tree, gamma=0.5, prior=0.0)[:1] == worked([[0, 0.08333, 0, 0.5]])


def test_rtmc_counts_a_rollout_once_for_a_signature_and_takes_tokens_for_actions() -> None:
    steps = [[CONTEXT, 0, CONTEXT, 1], [CONTEXT, 0, CONTEXT, 1]]
    keys = [{"states": ["s", "s"]}, {"states": ["s", "t"]}]
    tree = tree_of([[1, 2, 9, 2], [1, 3, 9, 3]], [1.0, 0.0], steps=steps, leaves=keys)
    # The first leaf generates 2 twice in state s: it counts at its first visit, with 1/2. Q = 1/2, V = 1/4.
    assert credit_of(rtmc, tree, gamma=0.5, prior=0.0) == worked([[0, 0.25, 0, 0.25], [0, -0.25, 0, 0]])


def test_a_fork_inside_a_session_does_not_end_its_credit() -> None:
    # Session 0 strips its reasoning: two rows, and a leaf all the same.
    rows, leaf_of_row = [[1, 70, 2], [1, 2, 9, 71, 3], [1, 4, 4]], [0, 0, 1]
    steps = [[CONTEXT, 0, 0], [CONTEXT, CONTEXT, CONTEXT, 1, 1], [CONTEXT, 0, 0]]
    tree = tree_of(rows, [1.0, 0.0], leaf_of_row=leaf_of_row, steps=steps)
    assert credit_of(spo, tree) == worked([[0, 0.5, 0.5], [0, 0.5, 0.5, 0.5, 0.5], [0, -0.5, -0.5]])
    assert credit_of(vine, tree) == worked([[0, 0.5, 0.5], [0, 0, 0, 0.5, 0.5], [0, -0.5, -0.5]])


def test_a_leaf_without_weight_has_no_scaled_credit_where_the_others_agree() -> None:
    tree = tree_of([[1, 2], [1, 3], [1, 4]], [1.0, 1.0, 0.0], leaves=[{}, {}, {"weight": 0.0}])
    given = {tree_grpo: {}, branpo: {}, gigpo: {"states": "observation"}, spo: {"by_std": True}}
    for estimator, options in given.items():
        assert credit_of(estimator, tree, **options) == worked([[0, 0]] * 3)


def test_a_leaf_without_weight_is_compared_by_its_own_outcome() -> None:
    tree = tree_of([[1, 2], [1, 3], [1, 4]], [1.0, 0.0, 1.0], leaves=[{}, {}, {"weight": 0.0}])
    # By the deviation of the others: mean 1/2, deviation 0.707107.
    assert behind_the_prompt(credit_of(tree_grpo, tree)) == worked([[HALF_ROOT], [-HALF_ROOT], [HALF_ROOT]])
    # V(s) = 1/2 of the first two, and Q of the third's action is its 1. Prior 2: (1 + 2 / 2) / 3 - 1/2.
    third = [credit_of(rtmc, tree, states="observation", prior=prior)[2] for prior in (0.0, 2.0)]
    assert third == worked([[0, 0.5], [0, 0.16667]])
    # Trunks 1, 0 have mean 1/2, deviation 0.707107; the third is a tree of its own.
    assert behind_the_prompt(credit_of(branpo, tree)) == worked([[HALF_ROOT], [-HALF_ROOT], [HALF_ROOT]])


def test_leaves_without_weight_count_by_their_number_where_there_are_no_others() -> None:
    leaves = [{"weight": 0.0}, {"weight": 0.0, "multiplicity": 3}]
    # V(root) = 1/4.
    assert credit_of(spo, tree_of([[1, 2], [1, 3]], [1.0, 0.0], leaves=leaves)) == worked([[0, 0.75], [0, -0.25]])


def test_branpos_leaves_without_a_suffix_take_no_part() -> None:
    # Suffixes 1 and 0. The first leaf ends in its trunk.
    credit = credit_of(branpo, tree_of([[1, 2], [1, 2, 3, 4], [1, 2, 3, 5]], [1.0, 1.0, 0.0]), by_std=False)
    assert [row[-1] for row in credit[1:]] == pytest.approx([0.5, -0.5])
    # Equal sessions have no suffix either.
    twins = credit_of(branpo, tree_of([[1, 2, 4], [1, 2, 5], [1, 7], [1, 7]], [1.0, 0.0, 1.0, 1.0]), by_std=False)
    assert [row[-1] for row in twins[:2]] == pytest.approx([0.5, -0.5])


def test_treerl_leaves_one_out_by_weight() -> None:
    # Others of the first: 0. Of the second: 1/3. Of the third: 1/2. V(root) = (1 - 1/3 - 2 / 2) / 4 = -1/12.
    tree = tree_of([[1, 2], [1, 3], [1, 4]], [1.0, 0.0, 0.0], leaves=[{}, {}, {"weight": 2.0}])
    assert credit_of(treerl, tree, with_root=False) == worked([[0, 1.08333], [0, -0.25], [0, -0.41667]])


def test_treepo_counts_a_group_of_leaves_once() -> None:
    # Leaves 0 and 1 fork twice with the same leaves below: 2 and 4. First: (3 (1 - 1/3) + 2 (1 - 1/2)) / 5.
    rows, leaf_of_row = [[1, 2, 5], [1, 4], [1, 2, 6], [1, 4], [1, 3]], [0, 0, 1, 1, 2]
    credit = credit_of(treepo, tree_of(rows, [1.0, 0.0, 0.0], leaf_of_row=leaf_of_row))
    assert [row[-1] for row in credit] == pytest.approx([0.6, 0.6, -0.4, -0.4, -1 / 3])


def test_a_call_that_context_interrupts_earns_its_reward_once_per_row() -> None:
    steps = [[CONTEXT, 0, CONTEXT, 0], [CONTEXT, 0, CONTEXT, 0]]
    # Token rewards 0 1, 0 0: mean 1/4, deviation 1/2 over the prompt. Every leaf is a tree: 0 1 has deviation 0.707107.
    tree = tree_of([[1, 2, 9, 3], [1, 4, 9, 5]], [1.0, 0.0], steps=steps)
    credit = credit_of(tree_grpo, tree, variant="tree_per_token")
    assert credit == worked([[0, -1.20711, 0, 2.20711], [0, -0.5, 0, -0.5]])
