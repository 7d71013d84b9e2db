"""What estimators see of a prompt's rows: nodes with spans and cuts, leaves, trees, steps; and what is missing."""

import numpy as np
import pytest
from worked_trees import CONTEXT, tree_of

from tree_rl.credit import CreditRow, CreditTree, Leaf, estimator_named
from tree_rl.credit.by_step import gigpo


def test_nodes_have_spans_parents_and_cuts() -> None:
    # Leaf 2 has a sub-agent with a prompt of its own.
    tree = tree_of([[1, 2, 3], [1, 2, 4, 4], [1, 5], [900, 6]], [1.0, 0.0, 0.5], leaf_of_row=[0, 1, 2, 2])
    first, second, third, sub_agent = (tree.path(row) for row in range(4))
    assert [(start, end) for _, start, end in first] == [(0, 1), (1, 2), (2, 3)]
    assert [(start, end) for _, start, end in second] == [(0, 1), (1, 2), (2, 4)]
    assert first[:2] == second[:2] and first[0][0] == 0
    assert [(start, end) for _, start, end in third] == [(0, 1), (1, 2)]
    # Its rows both hang below the root, which has no token where the sub-agent starts.
    assert [(start, end) for _, start, end in sub_agent] == [(0, 2)]
    shared, own = first[1][0], first[2][0]
    assert tree.parent_V[own] == shared and tree.parent_V[shared] == 0 == tree.parent_V[sub_agent[0][0]]
    cut_tokens = {node: int(tree.forest.input_ids[cut]) if cut >= 0 else None for node, cut in enumerate(tree.cut_V)}
    assert (cut_tokens[0], cut_tokens[shared], cut_tokens[own], cut_tokens[sub_agent[0][0]]) == (None, 1, 2, None)
    assert tree.passes_VP[shared].tolist() == [True, True, False]


def test_trees_are_leaves_that_share_what_the_model_said_or_their_key() -> None:
    rows = [[1, 2, 3], [1, 2, 4], [1, 5], [1, 5, 6]]
    said = [[CONTEXT, 0, 0], [CONTEXT, 0, 0], [CONTEXT, CONTEXT], [CONTEXT, CONTEXT, 0]]
    assert tree_of(rows, [0.0] * 4, steps=said).tree_P.tolist() == [0, 0, 1, 2], "5 is context, which makes no tree"
    keys = [{"tree": "a"}, {"tree": "b"}, {"tree": "a"}, {}]
    assert tree_of(rows, [0.0] * 4, steps=said, leaves=keys).tree_P.tolist() == [0, 1, 0, 2]


def test_steps_are_those_that_rows_contain_in_order_of_time() -> None:
    # Calls 0 and 3 are in rows, 1 and 2 were side calls that train nothing: call 0 earns their rewards, and call 3 that
    # of an empty answer after it. Row order is not the order of time.
    rows, steps = [[1, 7, 9, 4], [1, 7, 8]], [[CONTEXT, CONTEXT, CONTEXT, 3], [CONTEXT, 0, 0]]
    rewards = [{"step_rewards": [0.25, 9.0, 8.0, 1.0, 0.5]}]
    tree = tree_of(rows, [2.0], leaf_of_row=[0, 0], steps=steps, leaves=rewards)
    assert tree.steps.number_T.tolist() == [0, 3] and tree.steps.reward_T.tolist() == [17.25, 1.5]
    assert tree.steps.returns(0.5).tolist() == [18.0, 1.5]
    assert tree.on_steps(np.array([5.0, 6.0])).tolist() == [0, 0, 0, 6, 0, 5, 5]


def test_a_missing_state_is_named_with_the_ways_to_report_it() -> None:
    tree = tree_of([[1, 2], [1, 3]], [1.0, 0.0], leaves=[{"states": ["s"]}, {}])
    with pytest.raises(ValueError, match=r"prompt: session 1 reports no state before call 0.*states=observation"):
        gigpo(tree)
    with pytest.raises(ValueError, match="states='seen': expected reported or observation"):
        gigpo(tree, states="seen")
    # Agents that failed have reported none, and end no job.
    reported = [{"states": ["s"]}] * 2 + [{"states": []}] * 2
    failed = tree_of([[1, 2], [1, 3], [1, 4], [1, 5]], [1.0, 0.0, 0.0, 1.0], leaves=reported)
    assert failed.states().tolist() == [0, 0, 1, 2]


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="session 0 reports 1 step_rewards, but made at least 2 calls"):
        tree_of([[1, 2, 3]], [1.0], steps=[[CONTEXT, 0, 1]], leaves=[{"step_rewards": [1.0]}])
    wrong = [
        ({"multiplicity": 0}, "multiplicity 0: expected a whole number of at least 1"),
        ({"multiplicity": 1.5}, "multiplicity 1.5: expected a whole number"),
        ({"multiplicity": "2"}, "multiplicity '2': expected a finite number"),
        ({"weight": -1.0}, "weight -1.0: expected at least 0"),
        ({"weight": float("inf")}, "weight inf: expected a finite number"),
        ({"reward": float("nan")}, "reward nan: expected a finite number"),
        ({"step_rewards": 1.0}, "step_rewards 1.0: expected a list"),
        ({"step_rewards": [None]}, "step_rewards: None: expected finite numbers"),
        ({"states": "s"}, "states 's': expected a list"),
        ({"states": [{"page": 1}]}, "states: {'page': 1} cannot be a key"),
    ]
    for given, message in wrong:
        with pytest.raises(ValueError, match=message):
            Leaf(**{"reward": 1.0, **given})
    assert Leaf(reward=1.0, states=[[1, [2]], "s"]).states == ((1, (2,)), "s")
    row = CreditRow(tokens=np.array([1, 2]), leaf=1, steps=np.array([CONTEXT, 0]))
    with pytest.raises(ValueError, match="expected rows of leaves 0 to 1"):
        CreditTree.of([row], [Leaf(reward=1.0), Leaf(reward=0.0)])
    with pytest.raises(ValueError, match="a step for each token"):
        CreditTree.of([CreditRow(tokens=np.array([1, 2]), leaf=0, steps=np.array([0]))], [Leaf(reward=1.0)])


def test_estimators_have_names_and_options() -> None:
    found = estimator_named("gigpo")
    assert found is not None and found.credit is gigpo
    found.check_options({"omega": 0.5, "gamma": 0.9})
    with pytest.raises(ValueError, match="no option 'omga'; known are omega, gamma, by_std, states"):
        found.check_options({"omga": 0.5})
    assert estimator_named("grpo") is None
    own = estimator_named("tree_rl.credit.by_step.vine")
    assert own is not None and not own.whitens
    with pytest.raises(ValueError, match=r"no_such_module\.credit.*PYTHONPATH"):
        estimator_named("no_such_module.credit")
    with pytest.raises(ValueError, match=r"\.credit\.by_step: .*relative import"):
        estimator_named(".credit.by_step")
    with pytest.raises(ValueError, match=r"credit_tree\.CONTEXT: expected a function"):
        estimator_named("tree_rl.credit.credit_tree.CONTEXT")
