"""Estimators of steps: what a call earned, compared with other calls from the same state.

A group of one has advantage 0. Legend: P leaves, T steps, F flat tokens.
"""

import numpy as np

from tree_rl.credit.credit_tree import CreditTree


def gigpo(
    tree: CreditTree, *, omega: float = 1.0, gamma: float = 0.95, by_std: bool = True, states: str = "reported"
) -> np.ndarray:
    """A = A_episode + omega A_step.

    A_episode = (R_i - mean) / (std + 1e-6) over the prompt's leaves. A_step is the same of the discounted returns
    sum over k >= t of gamma^(k - t) r_k, over the steps of the prompt that start from one state.
    Source: GiGPO, arXiv 2505.10978, `gigpo/core_gigpo.py`. Readings: a single leaf has 0, where the code leaves R; a
    leaf counts once in A_episode, where the code by default counts it once per step.

    Args:
        omega: weight of the step's advantage.
        gamma: discount per step.
        by_std: False only subtracts means.
        states: see `CreditTree.states`.
    """
    episode_P = tree.normalise_leaves(tree.reward_P, by_std=by_std)
    step_T = tree.normalise_steps(tree.steps.returns(gamma), tree.states(states), by_std=by_std)
    return tree.on_leaves(episode_P) + omega * tree.on_steps(step_T)


def vine(tree: CreditTree) -> np.ndarray:
    """A_t = r_t + V(s_t+1) - V(s_t); V(s) is the mean of what leaves through state s earn after it, 0 at the end.

    The state before a step is the last token before it. Source: VinePPO, arXiv 2410.01679, without discount. Readings:
    the resamples of a state are all leaves with a step behind it, the step's own among them; a state of only one leaf
    was not resampled, so a step reaches to the next state that was.
    """
    steps, forest = tree.steps, tree.forest
    if not len(steps):
        return np.zeros(forest.num_flat)
    first_T = forest.row_index.values[steps.first_T]
    state_T = forest.parent[first_T]
    returned_T, by_first = steps.returns(1.0), np.argsort(first_T, kind="stable")
    states, state_index_T = np.unique(state_T, return_inverse=True)
    ends = np.where(states < 0, forest.num_unique, forest.subtree_end[states])
    starts, stops = np.searchsorted(first_T[by_first], [states + 1, ends])
    value, number = np.zeros(len(states)), np.zeros(len(states))
    for index, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        behind = np.sort(by_first[start:stop])
        leaf, first = np.unique(steps.leaf_T[behind], return_index=True)
        # Leaves of weight 0 count only where there are no others.
        share = tree.share_P[leaf] if tree.share_P[leaf].any() else tree.multiplicity_P[leaf]
        value[index] = share @ returned_T[behind[first]] / share.sum()
        number[index] = tree.number_P[leaf].sum()
    value_T, number_T = value[state_index_T], number[state_index_T]
    advantage_T, after, earned, end = np.zeros(len(steps)), 0.0, 0.0, len(steps)
    for step in reversed(range(len(steps))):
        earned += steps.reward_T[step]
        starts_leaf = step == 0 or steps.leaf_T[step - 1] != steps.leaf_T[step]
        if number_T[step] > 1 or starts_leaf:
            if number_T[step] > 1:
                advantage_T[step:end] = earned + after - value_T[step]
            after, earned, end = 0.0 if starts_leaf else value_T[step], 0.0, step
    return tree.on_steps(advantage_T)


def rtmc(
    tree: CreditTree, *, gamma: float = 0.99, prior: float = 2.0, smooth: str = "action", states: str = "reported"
) -> np.ndarray:
    """A = Q(s, a) - V(s): mean returns of the rollouts that took an action in a state, and that were in the state.

    Returns are discounted sums of rewards; a rollout counts once, at its first visit to the state, and at its first
    use of the action there. Source: RTMC, arXiv 2604.11037, which has no code. Its smoothing is read in two ways:

    Args:
        gamma: discount per step.
        prior: number of samples that the prior stands for; 0 does not smooth.
        smooth: `action`: Q moves towards V, Q' = (n Q + prior V) / (n + prior), n the rollouts of signature (s, a).
            `state`: V moves towards the prompt's mean outcome M, V' = (n V + prior M) / (n + prior), n the rollouts of
            the state, so that a state that one rollout visits is compared with the prompt.
        states: see `CreditTree.states`.
    """
    if smooth not in ("action", "state"):
        raise ValueError(f"smooth={smooth!r}: expected action or state")
    steps, returned_T, state_T = tree.steps, tree.steps.returns(gamma), tree.states(states)
    pairs = np.stack([state_T, tree.actions()], axis=1)
    signature_T = np.unique(pairs, axis=0, return_inverse=True)[1].ravel()

    def mean(key_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first = np.unique(np.stack([key_T, steps.leaf_T], axis=1), axis=0, return_index=True)[1]
        key_X, leaf_X = key_T[first], steps.leaf_T[first]
        share_X = tree.share_P[leaf_X]
        # Leaves of weight 0 count only where there are no others.
        share_X = np.where(np.bincount(key_X, share_X)[key_X] > 0, share_X, tree.multiplicity_P[leaf_X])
        share = np.bincount(key_X, share_X)
        return (np.bincount(key_X, share_X * returned_T[first]) / share)[key_T], share[key_T]

    (q_T, taken_T), (value_T, visited_T) = mean(signature_T), mean(state_T)
    if smooth == "action":
        q_T = (taken_T * q_T + prior * value_T) / (taken_T + prior)
    else:
        # Steps with states of their own: each of the sessions that the leaf stands for is alone in its.
        is_own_P = np.array([states == "reported" and leaf.states == () for leaf in tree.leaves])
        visited_T = visited_T / np.where(is_own_P, tree.multiplicity_P, 1)[steps.leaf_T]
        value_T = (visited_T * value_T + prior * tree.below()[0][0]) / (visited_T + prior)
    return tree.on_steps(q_T - value_T)
