"""Estimators by name: those of tree_rl, and functions of a user by their dotted name."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from tree_rl.credit import by_node, by_step
from tree_rl.credit.credit_tree import CONTEXT, CreditRow, CreditTree, Leaf


@dataclass(frozen=True, slots=True)
class Estimator:
    """A function of a prompt's tree, and what the trainer does with its result."""

    credit: Callable[..., np.ndarray]
    """Takes a `CreditTree`, and options by keyword; returns an advantage for each flat token, float64 [F]."""
    whitens: bool = False
    """True whitens the advantages over the trained tokens of the batch."""

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise an error for an option that the function does not take; of ours, for a value that it cannot use."""
        parameters = inspect.signature(self.credit).parameters
        known = [name for name, one in parameters.items() if one.kind is inspect.Parameter.KEYWORD_ONLY]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"no option {unknown[0]!r}; known are {', '.join(known) or 'none'}")
        if self not in ESTIMATORS.values():
            return
        steps = np.array([CONTEXT, 0, 1])
        rows = [CreditRow(tokens=np.array([0, token, 2]), leaf=token, steps=steps) for token in range(2)]
        tree = CreditTree.of(rows, [Leaf(reward=reward, states=["s", "s"]) for reward in (0.0, 1.0)])
        with np.errstate(all="ignore"):
            if not np.isfinite(self.credit(tree, **options)).all():
                raise ValueError(f"{dict(options)}: expected finite numbers with which an advantage is finite")


ESTIMATORS: Mapping[str, Estimator] = {
    "tree_loo": Estimator(by_node.tree_loo),
    "tree_grpo": Estimator(by_node.tree_grpo),
    "treepo": Estimator(by_node.treepo, whitens=True),
    "treerl": Estimator(by_node.treerl),
    "spo": Estimator(by_node.spo),
    "branpo": Estimator(by_node.branpo),
    "gigpo": Estimator(by_step.gigpo),
    "vine": Estimator(by_step.vine),
    "rtmc": Estimator(by_step.rtmc),
}


def imported(name: str) -> Any:
    """The object of a dotted name. Raises a ValueError that says what is missing."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"{name}: {error}; put its folder on PYTHONPATH, or correct the name") from error


def estimator_named(name: str) -> Estimator | None:
    """The estimator of a name; None for a name without a dot that is none of `ESTIMATORS`.

    A dotted name is that of a function of a `CreditTree`, or of an `Estimator`.
    """
    if name in ESTIMATORS or "." not in name:
        return ESTIMATORS.get(name)
    found = imported(name)
    if not isinstance(found, Estimator) and not callable(found):
        raise ValueError(f"{name}: expected a function of a CreditTree, or an Estimator, found {found!r}")
    return found if isinstance(found, Estimator) else Estimator(found)
