"""Credit on trees: which part of a prompt's tree earned its sessions' rewards. Needs NumPy only."""

from tree_rl.credit.credit_tree import CreditRow, CreditTree, Leaf
from tree_rl.credit.named import ESTIMATORS, Estimator, estimator_named
from tree_rl.credit.reductions import normalise, whiten

__all__ = [
    "ESTIMATORS",
    "CreditRow",
    "CreditTree",
    "Estimator",
    "Leaf",
    "estimator_named",
    "normalise",
    "whiten",
]
