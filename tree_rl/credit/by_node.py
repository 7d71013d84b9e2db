"""Estimators that compare leaves, and the nodes above them.

V(n) is the mean outcome of the leaves below node n; V(root) is that of all leaves. A group of one has advantage 0.
Legend: P leaves, V nodes, T steps, F flat tokens.
"""

import numpy as np

from tree_rl.credit.credit_tree import CONTEXT, CreditTree
from tree_rl.credit.reductions import normalise


def tree_loo(tree: CreditTree) -> np.ndarray:
    """Leave-one-out over sibling subtrees: A(n) = V(n) - mean outcome of the leaves of parent(n) that are not below n.

    Only the last fork counts: everything before it is the same for both sides. 0 for tokens that all leaves share; the
    outcome itself if there is only one leaf. If leaves share only the prompt it is RLOO (arXiv 2402.14740). TreeRL
    (arXiv 2506.11902) and Tree-GRPO (arXiv 2509.21240) also compare with the root.
    """
    if len(tree.leaves) == 1 and tree.leaves[0].multiplicity == 1:
        return tree.on_leaves(tree.reward_P)
    passes_VP, parent_V = tree.passes_VP, np.maximum(tree.parent_V, 0)
    value_V, _ = tree.below()
    others_VP = (passes_VP[parent_V] & ~passes_VP) * tree.share_P
    total_V = others_VP.sum(axis=1)
    baseline_V = others_VP @ tree.reward_P / np.where(total_V > 0, total_V, 1.0)
    return tree.on_nodes(np.where(total_V > 0, value_V - baseline_V, 0.0))


def tree_grpo(tree: CreditTree, *, variant: str = "tree") -> np.ndarray:
    """A = GRPO(R; prompt) + GRPO(R; tree), GRPO(R; g) = (R - mean_g) / (std_g + 1e-6).

    Source: Tree-GRPO, arXiv 2509.21240, `ray_trainer_ts.py:168-242`. Reading: a group of one has 0, where the code
    leaves R, because most trees that occur by themselves have one leaf.

    Args:
        variant: `tree`: the sum. `tree_2norm`: GRPO within the prompt, then of the result within the tree.
            `tree_inner`: within the tree alone. `tree_per_token`: the sum, of token rewards (a step's on its last
            token) over the generated tokens of the prompt's, or the tree's, rows.
    """
    if variant == "tree_per_token":
        return _per_token(tree)
    within_P = tree.normalise_leaves(tree.reward_P)
    inner_P = tree.normalise_leaves(within_P if variant == "tree_2norm" else tree.reward_P, tree.tree_P)
    if variant not in ("tree", "tree_2norm", "tree_inner"):
        raise ValueError(f"variant={variant!r}: expected tree, tree_2norm, tree_inner or tree_per_token")
    return tree.on_leaves(within_P + inner_P if variant == "tree" else inner_P)


def _per_token(tree: CreditTree) -> np.ndarray:
    steps = tree.steps
    reward_F = np.append(steps.reward_T, 0.0)[steps.step_F]
    # A call that context interrupts ends once in a row.
    row_F = np.repeat(np.arange(len(tree.rows)), tree.forest.row_index.lengths)
    places = np.stack([row_F, steps.step_F], axis=1)[::-1]
    is_end_F = np.zeros(len(row_F), dtype=bool)
    is_end_F[len(row_F) - 1 - np.unique(places, axis=0, return_index=True)[1]] = True
    # A row that leaves a call at a fork does not have its end.
    token_F = steps.step_F * tree.forest.num_unique + tree.forest.row_index.values
    reward_F = np.where(is_end_F & ~np.isin(token_F, token_F[~is_end_F]), reward_F, 0.0)
    leaf_F = tree.on_leaves(np.arange(len(tree.leaves))).astype(np.int64)
    generated = np.flatnonzero(steps.step_F != CONTEXT)
    share_X, number_X = tree.share_P[leaf_F[generated]], tree.number_P[leaf_F[generated]]
    groups = (np.zeros(len(generated), dtype=np.int64), tree.tree_P[leaf_F[generated]])
    advantage_F = np.zeros(len(reward_F))
    for group in groups:
        advantage_F[generated] += normalise(reward_F[generated], group, share_X=share_X, number_X=number_X)
    return advantage_F


def treepo(tree: CreditTree) -> np.ndarray:
    """A_i = sum over g of |g| (R_i - mean_g) / sum over g of |g|, over the nodes g above leaf i with several leaves.

    The trainer whitens the result over the tokens of the batch. Source: TreePO, arXiv 2508.17445,
    `core_algos.py:266-352` with weights by size. Reading: a group counts once, where the code counts it again in every
    segment of fixed length until the next fork.
    """
    value_V, _ = tree.below()
    size_V = np.where(tree.number_below() > 1, tree.number_below(), 0.0)
    # Forks inside leaves make several nodes with the same leaves, which are one group.
    groups = np.unique(tree.passes_VP, axis=0, return_index=True)[1]
    size_VP = np.zeros(tree.passes_VP.shape)
    size_VP[groups] = size_V[groups, None] * tree.passes_VP[groups]
    total_P = np.maximum(size_VP.sum(axis=0), 1.0)
    return tree.on_leaves((size_VP * (tree.reward_P - value_V[:, None])).sum(axis=0) / total_P)


def treerl(tree: CreditTree, *, with_root: bool = True) -> np.ndarray:
    """A(n) = ([V(n) - V(parent)] + [V(n) - V(root)]) / sqrt(number of leaves below n).

    V is the mean of R_i - mean of the other leaves' R. Source: TreeRL, arXiv 2506.11902, eq. 2 to 4, and
    `tree_node.py`, `parallel_mcts.py`. Readings: all leaves are selected ones, and the root of their number divides the
    difference, where the code divides both of its values, each by its own.

    Args:
        with_root: False leaves out the difference to the root.
    """
    weight_P = np.array([leaf.weight for leaf in tree.leaves])
    others_P = tree.share_P.sum() - weight_P
    sum_P = (tree.share_P * tree.reward_P).sum() - weight_P * tree.reward_P
    has_others_P = others_P > 0
    apart_P = np.where(has_others_P, tree.reward_P - sum_P / np.where(has_others_P, others_P, 1.0), 0.0)
    value_V, _ = tree.below(apart_P)
    local_V = tree.minus_parent(value_V)
    summed_V = local_V + (value_V - value_V[0] if with_root else 0.0)
    return tree.on_nodes(summed_V / np.sqrt(np.maximum(tree.number_below(), 1.0)))


def spo(tree: CreditTree, *, by_std: bool = False) -> np.ndarray:
    """A(n) = V(n) - V(parent), or that / (std_parent + 1e-8), and 0 where std_parent is at most 1e-8.

    Source: SPO-tree, arXiv 2505.23564, `tree_episode_generator.py:80-139`. Reading: V and std (over n) are those of the
    leaves below a node, where the code takes those of its children, which is the same where all have equally many.

    Args:
        by_std: True divides by the deviation at the parent.
    """
    value_V, std_V = tree.below()
    advantage_V = tree.minus_parent(value_V)
    if by_std:
        scale_V = std_V[np.maximum(tree.parent_V, 0)]
        # Where the others agree, only a leaf of weight 0 can differ, which no deviation measures.
        advantage_V = np.where(scale_V > 1e-8, advantage_V / (scale_V + 1e-8), 0.0)
    return tree.on_nodes(advantage_V)


def branpo(tree: CreditTree, *, solved_from: float = 0.5, by_std: bool = True) -> np.ndarray:
    """Trunk: A = GRPO over the prompt's trees of their mean outcome. Suffix: A = GRPO over all suffixes of the prompt;
    0 instead of a positive A in the first step of a suffix that is dispreferred.

    A trunk is what several leaves of a tree share, a suffix what one leaf has alone; a tree of one leaf is all trunk.
    Source: BranPO, arXiv 2602.03719, `agent_ppo_branch_trainer.py:131-157,712`. Readings: the branch set is all
    suffixes of a prompt, as in the code (within one trunk, equal outcomes would have no positive A to remove); a suffix
    is dispreferred if another of its tree earned more, or as much in fewer steps where the prompt's mean outcome is
    above `solved_from`; a trunk trains in each of its rows, where the code trains it in one.
    """
    share_P, reward_P = tree.share_P, tree.reward_P
    share_G = np.bincount(tree.tree_P, share_P)
    # Leaves of weight 0 count only in a tree without others.
    mean_P = np.where(share_G[tree.tree_P] > 0, share_P, tree.multiplicity_P)
    value_G = np.bincount(tree.tree_P, mean_P * reward_P) / np.bincount(tree.tree_P, mean_P)
    counts_G = (share_G > 0).astype(np.float64)
    one_group = np.zeros(len(value_G), dtype=np.int64)
    trunk_G = normalise(value_G, one_group, share_X=counts_G, number_X=counts_G, by_std=by_std)
    branched_P = np.bincount(tree.tree_P, tree.number_P)[tree.tree_P] > 1
    leaf_P = np.arange(len(reward_P))
    leaf_F, step_F = tree.on_leaves(leaf_P), tree.steps.step_F
    tree_F = tree.tree_P[leaf_F]
    # Trees may begin with equal tokens: a token that two of them share is still a leaf's own in each.
    in_tree_PG = tree.number_P[:, None] * (tree.tree_P[:, None] == np.arange(len(value_G)))
    number_below_F = (tree.passes_VP @ in_tree_PG)[tree.node_F, tree_F]
    own_F = (step_F != CONTEXT) & (number_below_F <= 1)
    has_suffix_P = branched_P & np.isin(leaf_P, leaf_F[own_F])
    # Leaves without a suffix take no part.
    group_P = np.where(has_suffix_P, 0, 1 + leaf_P)
    suffix_P = tree.normalise_leaves(reward_P, group_P, by_std=by_std)
    loses_P = has_suffix_P & (suffix_P > 0) & _is_dispreferred(tree, solved_from)
    first_step_P = np.full(len(leaf_P), len(tree.steps))
    np.minimum.at(first_step_P, leaf_F[own_F], step_F[own_F])
    suffix_F = np.where(loses_P[leaf_F] & (step_F == first_step_P[leaf_F]), 0.0, suffix_P[leaf_F])
    is_trunk_F = (number_below_F > 1) | ~branched_P[leaf_F]
    return np.where(is_trunk_F, trunk_G[tree_F], suffix_F)


def _is_dispreferred(tree: CreditTree, solved_from: float) -> np.ndarray:
    """bool [P], True if another leaf of its tree did better."""
    steps_P = np.bincount(tree.steps.leaf_T, minlength=len(tree.leaves))
    share_P, reward_P = tree.share_P, tree.reward_P
    shorter_wins = (share_P * reward_P).sum() > solved_from * share_P.sum()
    is_rival_PP = (tree.tree_P[:, None] == tree.tree_P) & (share_P > 0)
    earned_more_PP = reward_P > reward_P[:, None]
    was_shorter_PP = (reward_P == reward_P[:, None]) & (steps_P < steps_P[:, None])
    found: np.ndarray = (is_rival_PP & (earned_more_PP | (was_shorter_PP & shorter_wins))).any(axis=1)
    return found
